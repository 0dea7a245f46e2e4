"""Decoding in strips of rows: the pixels of the whole decode, in less memory, and only where it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.vae import layers, strips
from tests.deployments.support.files import noise
from tests.pipelines.vae.support.live_bytes import LiveBytes

EXACT_DB = 100.0


def decibels(one: Tensor, other: Tensor) -> float:
    """Of pixels in [-1, 1]."""
    return 10 * math.log10(4 / max((one.double() - other.double()).square().mean().item(), 1e-30))


def tiny_vae(**options: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    levels = 3
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8, 16, 32),
        norm_num_groups=4,
        **{"latent_channels": 4, "sample_size": 32, **options},
    )
    return vae.eval().requires_grad_(False)


@pytest.mark.parametrize("strip_bytes", [1, 5000, 40_000, 2**28])
@pytest.mark.parametrize("size", [(1, 5), (13, 9)])
def test_strips_of_any_height_are_the_whole(strip_bytes: int, size: tuple[int, int]) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, torch.randn(2, 4, *size)
    in_rows = strips.decode_in_rows(decoder, latents_BCHW, strip_bytes)
    assert decibels(in_rows, decoder(latents_BCHW)) > EXACT_DB


def seams(convolved: Callable[..., Any]) -> Callable[..., Any]:
    """Strips that know nothing of each other."""

    def apart(convs: Any, bands: Any, *others: Any, **options: Any) -> list[Tensor]:
        parts = [convolved(convs, [part], *others, **options)[0] for part in bands[0].split(4, dim=2)]
        return [torch.cat(parts, dim=2)]

    return apart


def test_strips_that_know_nothing_of_each_other_show(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, torch.randn(1, 4, 13, 9)
    for module in (strips, layers):
        monkeypatch.setattr(module, "convolved", seams(layers.convolved))
    assert decibels(strips.decode_in_rows(decoder, latents_BCHW), decoder(latents_BCHW)) < 45


@pytest.mark.parametrize("name", ["flux-shapes", "kontext-shapes"])
def test_shipped_models_paint_the_same_where_tiles_would_not(name: str) -> None:
    vae = AutoencoderKL.from_pretrained(resolve_path(name) / "vae").requires_grad_(False)
    pixels = torch.from_numpy(np.array(noise(24, 32).resize((192, 256)))).movedim(-1, 0)[None] / 127.5 - 1
    latents_BCHW = vae.encode(pixels).latent_dist.mean
    whole = vae.decoder(latents_BCHW)
    assert decibels(strips.decode_in_rows(vae.decoder, latents_BCHW, 2**17), whole) > EXACT_DB
    vae.enable_tiling()
    assert decibels(vae.decode(latents_BCHW, return_dict=False)[0], whole) < 45, "there is no need of rows"


def test_rows_of_bfloat16_are_as_near_to_the_truth_as_the_whole() -> None:
    vae, latents_BCHW = tiny_vae(), torch.randn(1, 4, 16, 16)
    truth, decoder, halves = vae.decoder(latents_BCHW), vae.decoder.bfloat16(), latents_BCHW.bfloat16()
    whole_db, rows_db = (
        decibels(f(halves), truth) for f in (decoder, lambda x: strips.decode_in_rows(decoder, x, 5000))
    )
    assert rows_db > whole_db - 1


def test_a_large_picture_takes_less_and_the_estimate_is_above() -> None:
    """On "meta", which has sizes and no values. Attention to itself is left out: there it takes what no GPU takes."""
    with torch.device("meta"):
        decoder = tiny_vae(mid_block_add_attention=False).bfloat16().decoder
        latents_BCHW = torch.empty(1, 4, 256, 256, dtype=torch.bfloat16)
    with LiveBytes() as whole:
        decoder(latents_BCHW)
    with LiveBytes() as in_rows:
        strips.decode_in_rows(decoder, latents_BCHW, 2**20)
    assert in_rows.peak < 0.75 * whole.peak
    assert whole.peak < strips.whole_bytes(decoder, latents_BCHW) < 2 * whole.peak


def test_what_fits_is_decoded_whole(tiny_flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tiny_flux)
    small, large = (checkpoint.defaults.request(width=width, height=64) for width in (32, 128))
    plain = checkpoint.decoder()
    sizes: list[int] = []
    real = strips.decode_in_rows
    monkeypatch.setattr(strips, "decode_in_rows", lambda decoder, x: (sizes.append(x.shape[-1]), real(decoder, x))[1])
    latents = checkpoint.first_latents(large)
    vae = plain._pipeline.vae
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    limit = strips.whole_bytes(vae.decoder, torch.empty(1, 4, 64 // factor, 32 // factor))
    decoder = checkpoint.decoder(memory_bytes=limit)
    frames = {request.width: decoder.decode(checkpoint.first_latents(request), request) for request in (small, large)}
    assert len(sizes) == 1
    np.testing.assert_allclose(frames[128], plain.decode(latents, large), atol=1)


def test_memory_is_given_back_where_much_is_held_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    held = {"memory_reserved": 10, "memory_allocated": 4}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    strips.give_back(torch.device("cpu"), 0)
    strips.give_back(torch.device("cuda"), 12)
    assert not calls
    strips.give_back(torch.device("cuda"), 11)
    assert calls == ["empty"]


def test_other_auto_encoders_are_told_so(tiny_wan: Path) -> None:
    with pytest.raises(ValueError, match=r"decoder.memory_gib is for .* AutoencoderKLWan: leave it out, and decoder"):
        Checkpoint(tiny_wan).decoder(memory_bytes=1)
    with pytest.raises(ValueError, match=r"decoder.compile is for .* AutoencoderKLWan"):
        Checkpoint(tiny_wan).decoder(compiled=True)
