"""Fused decoders of clips that diffusers decodes all frames at once equal diffusers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.vae import frame_conv
from pipelines.vae.chunks import decode_chunks
from pipelines.vae.fused_clips import fuse_clip_decoder, is_fused_clip_decoder, is_supported_clip_decoder
from tests.pipelines.vae.support.vaes import WHOLE_CLIPS, decoded, error, published_in_small

NAMES = tuple(WHOLE_CLIPS)
HALF = ("reflected", "shortcuts", "frame by frame")


def noise(num_frames: int, rows: int = 2, columns: int = 3) -> Tensor:
    return torch.randn(1, 8, num_frames, rows, columns, generator=torch.Generator().manual_seed(1))


def fused(vae: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a copy of ``vae`` whose decoder is fused."""
    changed = copy.deepcopy(vae)
    assert is_supported_clip_decoder(changed.decoder)
    changed.decoder = fuse_clip_decoder(changed.decoder, dtype)
    assert is_fused_clip_decoder(changed.decoder)
    return changed


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_clip_is_that_of_diffusers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of frames run together or one by one; a clip of one frame has convolutions of its own."""
    plain = WHOLE_CLIPS[name]()
    quick = fused(plain)
    for num_frames, run_bytes in ((1, 2**28), (3, 2**28), (3, 1)):
        monkeypatch.setattr(frame_conv, "RUN_BYTES", run_bytes)
        expected = decoded(plain, noise(num_frames))
        assert expected.std() > 0.1
        pixels = decoded(quick, noise(num_frames))
        assert pixels.dtype is torch.float32
        assert error(pixels, expected) < 1e-5


@pytest.mark.parametrize("name", HALF)
@torch.no_grad()
def test_float16_is_nearer_to_float32_than_bfloat16_as_written(name: str) -> None:
    """Residual blocks add up to values beyond float16's: only their norms are read."""
    plain, largest = WHOLE_CLIPS[name](), list[float]()
    blocks = [part for part in plain.decoder.modules() if hasattr(part, "conv2")]
    for block in blocks:
        block.register_forward_hook(lambda *call: largest.append(float(call[-1].abs().max())))
    decoded(plain, noise(2))
    factor = 2e5 / max(largest)
    shortcuts = [getattr(part.conv_shortcut, "conv", part.conv_shortcut) for part in blocks if hasattr(part, "norm3")]
    added = [plain.decoder.conv_in.conv, *(block.conv2.conv for block in blocks), *filter(None, shortcuts)]
    for conv in added:
        conv.weight.mul_(factor)
    largest.clear()
    expected = decoded(plain, noise(2))
    assert max(largest) > 2 * torch.finfo(torch.float16).max
    half = decoded(copy.deepcopy(plain).to(torch.bfloat16), noise(2).to(torch.bfloat16))
    assert error(decoded(fused(plain, torch.float16), noise(2)), expected) < 0.5 * error(half, expected) < 0.1


TILES = {
    "reflected": {
        "tile_sample_min_height": 96,
        "tile_sample_min_width": 96,
        "tile_sample_stride_height": 64,
        "tile_sample_stride_width": 64,
    },
    "frame by frame": {
        "tile_sample_min_height": 64,
        "tile_sample_min_width": 64,
        "tile_latent_min_height": 4,
        "tile_latent_min_width": 4,
    },
}


@pytest.mark.parametrize("name", TILES)
@torch.no_grad()
def test_tiles_are_those_of_diffusers(name: str) -> None:
    plain = WHOLE_CLIPS[name]()
    quick = fused(plain)
    latents = noise(1, columns=4 if name == "reflected" else 5)
    whole = decoded(plain, latents)
    for vae in (plain, quick):
        vae.enable_tiling(**TILES[name])
    expected = decoded(plain, latents)
    assert error(whole, expected) > 1e-3
    assert error(decoded(quick, latents), expected) < 1e-5


@torch.no_grad()
def test_latent_frames_come_one_after_the_other() -> None:
    plain = WHOLE_CLIPS["frame by frame"]()
    quick = fused(plain)
    chunks = list(decode_chunks(quick, noise(3)))
    assert [chunk.shape[2] for chunk in chunks] == [1, 4, 4]
    assert error(torch.cat(chunks, 2), decoded(plain, noise(3)).clamp(-1, 1)) < 1e-5


@torch.no_grad()
def test_frames_depend_on_those_that_the_decoder_was_made_for() -> None:
    quick = fused(WHOLE_CLIPS["reflected"]())
    with pytest.raises(ValueError, match="a prepared decoder has causal=False, and the call has True"):
        quick.decode(noise(1), causal=True)


@pytest.mark.parametrize("changes", [{"timestep_conditioning": True}, {"decoder_inject_noise": (True,) * 5}])
def test_decoders_that_read_noise_or_time_are_refused(changes: dict[str, Any]) -> None:
    assert not is_supported_clip_decoder(published_in_small("LTX-Video", 16, **changes).decoder)
