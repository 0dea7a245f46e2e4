"""Fused decoders of clips on a GPU have the right error, bytes and kernels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.blocks.compilation import compile_decoder
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from pipelines.vae.chunks import decode_chunks
from tests.pipelines.vae.support.vaes import VAES, WHOLE_CLIPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def noise(rows: int = 5, columns: int = 6) -> Tensor:
    return torch.randn(1, 4, 4, rows, columns, generator=torch.Generator().manual_seed(1)).cuda()


def decoded(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    return torch.cat(list(decode_chunks(vae, latents_BCFHW.to(vae.dtype))), 2).float()


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_fused_decoder_is_as_near_to_float32_as_diffusers_in_half_precision(name: str, dtype: torch.dtype) -> None:
    exact = VAES[name]().cuda()
    half = copy.deepcopy(exact).to(torch.float16 if dtype is torch.float32 else dtype)
    fused = copy.deepcopy(exact).to(dtype)
    assert compile_decoder(fused) == ()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = decoded(exact, noise())
    errors = [float((decoded(vae, noise()) - expected).norm() / expected.norm()) for vae in (fused, half)]
    assert errors[0] < 1.2 * errors[1]
    assert errors[0] < (5e-3 if dtype is torch.float32 else 5e-2)
    assert torch.equal(decoded(fused, noise()), decoded(fused, noise()))
    assert torch.equal(decoded(fused, noise()), fused.decode(noise().to(dtype)).sample.float())


def whole(vae: Any, rows: int = 3, columns: int = 4, num_frames: int = 3) -> Tensor:
    latents = torch.randn(1, 8, num_frames, rows, columns, generator=torch.Generator().manual_seed(1)).cuda()
    pixels: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0].float()
    return pixels


@pytest.mark.parametrize("name", WHOLE_CLIPS)
@torch.no_grad()
def test_float16_is_nearer_to_float32_than_bfloat16_of_diffusers(name: str) -> None:
    exact = WHOLE_CLIPS[name]().cuda()
    fused = copy.deepcopy(exact)
    assert compile_decoder(fused) == ()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = {number: whole(exact, num_frames=number) for number in (1, 3)}
    half = copy.deepcopy(exact).to(torch.bfloat16)
    for number, pixels in expected.items():
        errors = [float((whole(vae, num_frames=number) - pixels).norm() / pixels.norm()) for vae in (fused, half)]
        assert errors[0] < 0.5 * errors[1]
    assert torch.equal(whole(fused), whole(fused))


@pytest.mark.parametrize("name", ["reflected", "zeros", "frame by frame"])
@torch.no_grad()
def test_kernels_of_whole_clips_are_those_of_every_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    vae = WHOLE_CLIPS[name]().cuda()
    compile_decoder(vae)
    for number in (1, 3):
        whole(vae, 2, 2, number)
    kernels = sorted(tmp_path.rglob("*"))
    for rows, columns, number in ((2, 3, 2), (3, 5, 1), (4, 8, 6)):
        whole(vae, rows, columns, number)
    assert sorted(tmp_path.rglob("*")) == kernels


@torch.no_grad()
def test_kernels_are_those_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are multiples of sixteen, or one, would choose other kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    vae = VAES["wan 2.2"]().cuda()
    compile_decoder(vae)
    decoded(vae, noise(2, 2)[:, :, :3])
    kernels = sorted(tmp_path.rglob("*"))
    for rows, columns in ((1, 1), (3, 5), (8, 16)):
        decoded(vae, noise(rows, columns))
    assert sorted(tmp_path.rglob("*")) == kernels


def test_a_prepared_decoder_makes_the_frames_of_the_plain_one(tiny_wan: Path) -> None:
    checkpoint = Checkpoint(tiny_wan, "cuda")
    request = checkpoint.defaults.request(Size(width=64, height=48, num_frames=13))
    latents = checkpoint.first_latents(request)
    expected = checkpoint.decoder().decode(latents, request)
    quick = checkpoint.decoder(compiled=True)
    quick.warm_kernels()
    for _ in range(5):
        parts = [media.frames_FHWC for media in quick.decode_chunks(latents, request)]
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2)
