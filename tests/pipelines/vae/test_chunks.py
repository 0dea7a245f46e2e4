"""Clips decoded piece by piece, against diffusers' own decoding of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.vae.chunks import decode_chunks, decodes_in_chunks
from tests.pipelines.support.checkpoints import tiny, tiny_cosmos, tiny_hunyuan, tiny_ltx
from tests.pipelines.support.checkpoints.parts import shake
from tests.pipelines.support.references.video import Clip

NUM_LATENT_FRAMES = 4
LATENTS = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
SIZES = {"base_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1, **LATENTS}
RESIDUAL = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}

VAES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "wan 2.1": tiny.wan_vae,
        "wan 2.2": lambda: shake(diffusers.AutoencoderKLWan(**SIZES, **RESIDUAL)),
        "qwen image": lambda: shake(diffusers.AutoencoderKLQwenImage(**SIZES)),
    }
)


def latents_like(channels: int) -> Tensor:
    return torch.randn(1, channels, NUM_LATENT_FRAMES, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_chunks_are_the_whole_bit_by_bit(name: str) -> None:
    vae = VAES[name]()
    assert decodes_in_chunks(vae)
    whole = vae.decode(latents_like(4), return_dict=False)[0]
    assert whole.std() > 0.01
    chunks = list(decode_chunks(vae, latents_like(4)))
    assert [chunk.shape[2] for chunk in chunks] == [1, 4, 4, 4]
    assert torch.equal(torch.cat(chunks, 2), whole)
    alone = [next(decode_chunks(vae, latent)) for latent in latents_like(4).split(1, dim=2)]
    assert not torch.allclose(alone[1][:, :, -1], chunks[1][:, :, -1]), "frames do not depend on those before"


def test_who_tiles_pictures_itself_decodes_whole() -> None:
    vae = tiny.wan_vae()
    vae.enable_tiling()
    assert not decodes_in_chunks(vae)


CLIPS: Mapping[str, tuple[Callable[[Path], Path], int]] = MappingProxyType(
    {
        "wan": (tiny.wan, NUM_LATENT_FRAMES),
        "cosmos with sound": (tiny_cosmos.cosmos_with_sound, NUM_LATENT_FRAMES),
        "ltx": (tiny_ltx.ltx, 1),
        "hunyuan": (tiny_hunyuan.hunyuan_video, NUM_LATENT_FRAMES),
    }
)


def painted(folder: Path) -> tuple[BlocksDecoder, Mapping[str, Any], MediaRequest]:
    """A decoder, and finished latents."""
    request = Clip(make=tiny.wan, reference=lambda *_: {}, num_latent_frames=NUM_LATENT_FRAMES).request(folder)
    pipeline = load_pipeline(Checkpoint(folder))
    return pipeline.decoder, pipeline.denoise(request), request


@pytest.mark.parametrize("name", CLIPS)
def test_frames_and_sound_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    make, num_chunks = CLIPS[name]
    decoder, latents, request = painted(make(tmp_path))
    whole = decoder.decode_all(latents, request)
    assert len(whole.frames_FHWC) == request.num_frames
    chunks = list(decoder.decode_chunks(latents, request))
    assert len(chunks) == num_chunks
    np.testing.assert_array_equal(np.concatenate([chunk.frames_FHWC for chunk in chunks]), whole.frames_FHWC)
    assert [chunk.sound for chunk in chunks[:-1]] == [None] * (num_chunks - 1)
    assert (chunks[-1].sound is None) == (whole.sound is None) == (name != "cosmos with sound")
    if whole.sound is not None:
        assert chunks[-1].sound is not None
        np.testing.assert_array_equal(chunks[-1].sound.samples_CT, whole.sound.samples_CT)


def test_a_chunk_comes_before_the_next_is_decoded(tiny_wan: Path) -> None:
    decoder, latents, request = painted(tiny_wan)
    calls: list[Any] = []
    decoder._pipeline.vae.decoder.register_forward_hook(lambda *call: calls.append(call))
    seen = [len(calls) for _ in decoder.decode_chunks(latents, request)]
    assert seen == [1, 2, 3, 4]


def test_a_guardrail_sees_the_whole_clip(tiny_wan: Path) -> None:
    decoder, latents, request = painted(tiny_wan)
    decoder._pipeline.requires_safety_checker = True
    assert [len(chunk.frames_FHWC) for chunk in decoder.decode_chunks(latents, request)] == [request.num_frames]
