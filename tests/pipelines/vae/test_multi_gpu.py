"""Decoders that work on several devices: the pictures and clips of one, or an error at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.vae import chunks, layers, multi_gpu, strips
from pipelines.vae.multi_gpu import spread
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.vae.test_chunks import VAES, painted
from tests.pipelines.vae.test_picture_bands import no_edges, own_statistics
from tests.pipelines.vae.test_strips import decibels, tiny_vae

CPU = torch.device("cpu")


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny pictures and clips are enough for three devices."""
    monkeypatch.setattr(strips, "MIN_BAND_ROWS", 2)
    monkeypatch.setattr(chunks, "MIN_BAND_ROWS", 1)


def assert_rounded_alike(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours.astype(int), theirs.astype(int), atol=1)
    assert (ours != theirs).mean() < 0.01


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_a_picture_is_that_of_one_device(tiny_flux: Path, few_rows: None, memory_bytes: int | None) -> None:
    checkpoint = Checkpoint(tiny_flux)
    request = checkpoint.defaults.request(width=32, height=64)
    latents = checkpoint.first_latents(request)
    divided = checkpoint.decoder(memory_bytes=memory_bytes, others=("cpu", "cpu"))
    assert_rounded_alike(divided.decode(latents, request), checkpoint.decoder().decode(latents, request))


def test_a_clip_is_that_of_one_device(tiny_wan: Path, few_rows: None) -> None:
    plain, latents, request = painted(tiny_wan)
    divided = BlocksDecoder(plain._opened, others=[CPU, CPU])
    calls: list[int] = []
    for index, decoder in enumerate(divided._decoders):
        decoder.register_forward_hook(lambda *_, index=index: calls.append(index))
    whole_FHWC = plain.decode(latents, request)
    pieces = [media.frames_FHWC for media in divided.decode_chunks(latents, request)]
    assert calls == [0, 1, 2] * len(pieces)
    assert_rounded_alike(np.concatenate(pieces), whole_FHWC)
    assert_rounded_alike(divided.decode_all(latents, request).frames_FHWC, whole_FHWC)
    assert calls == 2 * [0, 1, 2] * len(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.2"]])
def test_a_start_with_devices_that_work_is_no_error(make: Any, dtype: torch.dtype) -> None:
    spread(make().to(dtype), [CPU, CPU])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.1"]])
def test_two_gpus_decode_what_the_cpu_does(make: Any, few_rows: None) -> None:
    assert_decode_what_the_cpu_does(make, "cuda:1", "cuda:0", num_times=50)


@torch.no_grad()
def assert_decode_what_the_cpu_does(make: Any, own: str, other: str, num_times: int) -> None:
    """Again and again: copies that do not wait for what they copy would show now and then."""
    vae, divided = make(), make().to(own)
    shape = (1, 4, 2, 24, 4) if chunks.decodes_in_chunks(vae) else (1, 4, 24, 4)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = vae.decode(latents, return_dict=False)[0]
    spread(divided, [torch.device(other)])
    for _ in range(num_times):
        assert decibels(divided.decode(latents.to(own), return_dict=False)[0].cpu(), whole) > 45


@pytest.mark.parametrize("make", [tiny_vae, VAES["wan 2.1"]])
def test_two_times_the_cpu_decodes_what_it_does_once(make: Any, few_rows: None) -> None:
    assert_decode_what_the_cpu_does(make, "cpu", "cpu", num_times=1)


def unlike(vae: Any) -> None:
    with pytest.raises(ValueError, match=r"is -?\d+ dB from what one does, and 20 are needed: leave"):
        spread(vae, [CPU])


@pytest.mark.parametrize(("name", "fault"), [("_edges", no_edges), ("_together", own_statistics)])
def test_a_start_with_devices_that_do_not_talk_is_an_error(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, name, fault)
    unlike(tiny_vae())


def test_a_decoder_of_clips_that_looks_at_all_rows_is_refused() -> None:
    vae = VAES["wan 2.1"]()
    vae.decoder.norm_out = torch.nn.GroupNorm(2, vae.decoder.conv_out.in_channels)
    unlike(vae)


def test_others_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decoder.num_devices is for .* AutoencoderKLLTXVideo: leave the key out"):
        Checkpoint(tiny_ltx.ltx(tmp_path)).decoder(others=("cpu",))
    vae = tiny_vae()
    vae.decoder.mid_block.attentions[0].norm_q = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"decoder.num_devices is for .* AutoencoderKL: leave"):
        multi_gpu.spread(vae, [CPU])
