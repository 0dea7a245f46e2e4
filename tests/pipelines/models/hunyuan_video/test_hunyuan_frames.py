"""HunyuanVideo 1.5's clips decoded frame by frame equal diffusers' decoding of the whole."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from pipelines.models.hunyuan_video.patches import frame_by_frame
from pipelines.vae.chunks import decode_chunks, decodes_in_chunks
from pipelines.vae.multi_gpu import distribute_decoder
from tests.pipelines.support.checkpoints.parts import shake

FRAMES = 4
CHANNELS = 4


def auto_encoder(temporal: int, *, is_wide: bool) -> Any:
    """Return an auto-encoder. With ``is_wide`` each block outputs the next one's channels, as published."""
    widths = (8, 16, 16, 32, 32) if is_wide else (16,) * 5
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        temporal_compression_ratio=temporal,
        downsample_match_channel=is_wide,
        upsample_match_channel=is_wide,
    )
    return shake(vae).eval()


def latents(seed: int = 1) -> Tensor:
    return torch.randn(1, CHANNELS, FRAMES, 4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("temporal", "is_wide"), [(4, True), (2, False)])
@torch.no_grad()
def test_frame_by_frame_is_the_whole(temporal: int, is_wide: bool) -> None:
    vae = auto_encoder(temporal, is_wide=is_wide)
    whole = vae.decode(latents(), return_dict=False)[0]
    assert whole.std() > 0.01
    assert not decodes_in_chunks(vae)
    frame_by_frame(vae)
    assert decodes_in_chunks(vae)
    chunks = list(decode_chunks(vae, latents()))
    assert [chunk.shape[2] for chunk in chunks] == [1, *[temporal] * (FRAMES - 1)]
    torch.testing.assert_close(torch.cat(chunks, 2), whole.clamp(-1, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vae.decode(latents()).sample, torch.cat(chunks, 2), rtol=0, atol=0)
    alone = next(decode_chunks(vae, latents()[:, :, 1:2]))
    assert not torch.allclose(alone[:, :, -1], chunks[1][:, :, -1], atol=1e-3), "frames do not depend on those before"


@torch.no_grad()
def test_clips_do_not_remember_each_other() -> None:
    vae = auto_encoder(4, is_wide=True)
    frame_by_frame(vae)
    first, other = decode_chunks(vae, latents()), decode_chunks(vae, latents(2))
    together = [chunk for pair in zip(first, other, strict=True) for chunk in pair]
    torch.testing.assert_close(torch.cat(together[::2], 2), vae.decode(latents()).sample, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(together[1::2], 2), vae.decode(latents(2)).sample, rtol=0, atol=0)


@torch.no_grad()
def test_who_wants_tiles_gets_them() -> None:
    plain, mended = auto_encoder(4, is_wide=True), auto_encoder(4, is_wide=True)
    frame_by_frame(mended)
    for vae in (plain, mended):
        vae.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32, tile_latent_min_height=2)
    torch.testing.assert_close(mended.decode(latents()).sample, plain.decode(latents()).sample, rtol=0, atol=0)


def test_several_devices_are_refused() -> None:
    vae = auto_encoder(4, is_wide=True)
    frame_by_frame(vae)
    with pytest.raises(
        ValueError, match=r"decoder.num_devices is for .* AutoencoderKLHunyuanVideo15: leave the key out"
    ):
        distribute_decoder(vae, [torch.device("cpu")])
