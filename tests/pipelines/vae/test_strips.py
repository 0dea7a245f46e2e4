"""Decoding in strips gives the pixels of the whole decode, in less memory, and refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.vae import layers, strips
from pipelines.vae.strips import check_fits, least_bytes
from tests.deployments.support.files import noise
from tests.pipelines.vae.support.live_bytes import LiveBytes
from tests.pipelines.vae.support.vaes import EXACT_DB, decibels, tiny_vae

GIB = 2**30
LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


@pytest.mark.parametrize("strip_bytes", [1, 5000, 40_000, 2**28])
@pytest.mark.parametrize("size", [(1, 5), (13, 9)])
def test_strips_of_any_height_are_the_whole(strip_bytes: int, size: tuple[int, int]) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, torch.randn(2, 4, *size)
    in_strips = strips.decode_in_strips(decoder, latents_BCHW, strip_bytes)
    assert decibels(in_strips, decoder(latents_BCHW)) > EXACT_DB


def seams(convolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``convolve`` on strips that do not see each other."""

    def apart(convs: Any, bands: Any, *others: Any, **options: Any) -> list[Tensor]:
        parts = [convolve(convs, [part], *others, **options)[0] for part in bands[0].split(4, dim=2)]
        return [torch.cat(parts, dim=2)]

    return apart


def test_strips_that_know_nothing_of_each_other_show(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, torch.randn(1, 4, 13, 9)
    for module in (strips, layers):
        monkeypatch.setattr(module, "convolve", seams(layers.convolve))
    assert decibels(strips.decode_in_strips(decoder, latents_BCHW), decoder(latents_BCHW)) < 45


@pytest.mark.parametrize("name", ["flux-shapes", "kontext-shapes"])
def test_shipped_models_paint_the_same_where_tiles_would_not(name: str) -> None:
    vae = AutoencoderKL.from_pretrained(resolve_path(name) / "vae").requires_grad_(False)
    pixels = torch.from_numpy(np.array(noise(24, 32).resize((192, 256)))).movedim(-1, 0)[None] / 127.5 - 1
    latents_BCHW = vae.encode(pixels).latent_dist.mean
    whole = vae.decoder(latents_BCHW)
    assert decibels(strips.decode_in_strips(vae.decoder, latents_BCHW, 2**17), whole) > EXACT_DB
    vae.enable_tiling()
    assert decibels(vae.decode(latents_BCHW, return_dict=False)[0], whole) < 45, "there is no need of rows"


def test_rows_of_bfloat16_are_as_near_to_the_truth_as_the_whole() -> None:
    vae, latents_BCHW = tiny_vae(), torch.randn(1, 4, 16, 16)
    truth, decoder, halves = vae.decoder(latents_BCHW), vae.decoder.bfloat16(), latents_BCHW.bfloat16()
    whole_db, rows_db = (
        decibels(f(halves), truth) for f in (decoder, lambda x: strips.decode_in_strips(decoder, x, 5000))
    )
    assert rows_db > whole_db - 1


def test_a_large_picture_takes_less_and_the_estimate_is_above() -> None:
    """Tensors on "meta" have no values. Self-attention is omitted: there it takes more than any GPU has."""
    with torch.device("meta"):
        decoder = tiny_vae(mid_block_add_attention=False).bfloat16().decoder
        latents_BCHW = torch.empty(1, 4, 256, 256, dtype=torch.bfloat16)
    with LiveBytes() as whole:
        decoder(latents_BCHW)
    with LiveBytes() as in_strips:
        strips.decode_in_strips(decoder, latents_BCHW, 2**20)
    assert in_strips.peak < 0.75 * whole.peak
    assert whole.peak < strips.peak_bytes(decoder, latents_BCHW) < 2 * whole.peak


def test_what_fits_is_decoded_whole(tiny_flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tiny_flux)
    small, large = (checkpoint.defaults.request(width=width, height=64) for width in (32, 128))
    plain = checkpoint.decoder()
    sizes: list[int] = []
    real = strips.decode_in_strips

    def watched(decoder: Any, latents_BCHW: Tensor) -> Tensor:
        sizes.append(latents_BCHW.shape[-1])
        return real(decoder, latents_BCHW)

    monkeypatch.setattr(strips, "decode_in_strips", watched)
    latents = checkpoint.first_latents(large)
    vae = plain._pipeline.vae
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    limit = strips.peak_bytes(vae.decoder, torch.empty(1, 4, 64 // factor, 32 // factor))
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
    strips.release_cached_memory(torch.device("cpu"), 0)
    strips.release_cached_memory(torch.device("cuda"), 12)
    assert not calls
    strips.release_cached_memory(torch.device("cuda"), 11)
    assert calls == ["empty"]


def test_other_auto_encoders_are_told_so(tiny_wan: Path) -> None:
    with pytest.raises(ValueError, match=r"decoder.memory_gib is for .* AutoencoderKLWan: leave it out"):
        Checkpoint(tiny_wan).decoder(memory_bytes=1)


def published_vae() -> AutoencoderKL:
    """Return FLUX's auto-encoder on "meta", without self-attention, which takes more there than any GPU has."""
    widths = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
    with torch.device("meta"):
        return AutoencoderKL(**LEVELS, **widths, mid_block_add_attention=False).bfloat16()


def peak_bytes(vae: AutoencoderKL, width: int, height: int) -> int:
    """Return the peak memory of a decode beside the weights."""
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (1, vae.config.latent_channels, height // scale, width // scale)
    latents_BCHW = torch.empty(shape, dtype=vae.dtype, device="meta")
    alive = LiveBytes()
    with alive, torch.no_grad():
        vae.decoder(latents_BCHW)
    return alive.peak


@pytest.mark.parametrize("size", [(64, 128), (512, 512), (2048, 2048)])
def test_no_decode_takes_less_than_it_is_said_to(size: tuple[int, int]) -> None:
    """The bound is below what diffusers' own decoder allocates at once, so a refusal is no guess, and near it."""
    tiny = tiny_vae(mid_block_add_attention=False).to("meta")
    for vae in (tiny, published_vae()):
        weight_bytes = sum(weight.nbytes for weight in vae.parameters())
        floor = least_bytes(vae, *size) - weight_bytes
        peak = peak_bytes(vae, *size)
        assert 0.4 * peak < floor <= peak


def test_the_figures_are_those_of_the_picture() -> None:
    """256 channels of 2048 x 2048 pixels in bfloat16 are 2 GiB."""
    vae = published_vae()
    weight_bytes = sum(weight.nbytes for weight in vae.parameters())
    assert least_bytes(vae, 2048, 2048) == weight_bytes + 4 * GIB
    check_fits(vae, 2048, 2048, weight_bytes + 4 * GIB)
    with pytest.raises(ValueError, match=r"2048x2048 pixels takes 4\.2 GiB at least, .* has 4\.0 GiB"):
        check_fits(vae, 2048, 2048, 4 * GIB)


def decoder_on(kind: str, decoder: BlocksDecoder, monkeypatch: pytest.MonkeyPatch) -> BlocksDecoder:
    """Put the decoder on a fake device of this kind, with little memory."""
    monkeypatch.setattr(decoder, "_opened", SimpleNamespace(device=torch.device(kind)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**23))
    return decoder


def test_whole_decodes_on_gpus_are_refused(tiny_flux: Path, tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, clips = Checkpoint(tiny_flux), Checkpoint(tiny_wan)
    small, large = (checkpoint.defaults.request(width=side, height=side) for side in (32, 1024))
    on_gpu = decoder_on("cuda", checkpoint.decoder(), monkeypatch)
    on_gpu.check_fits(small)
    with pytest.raises(ValueError, match=r"ask for a smaller size, or set decoder\.memory_gib"):
        on_gpu.check_fits(large)
    for decoder in (checkpoint.decoder(memory_bytes=1), clips.decoder()):
        decoder_on("cuda", decoder, monkeypatch).check_fits(large)
    monkeypatch.setattr(on_gpu, "_others", (torch.device("cuda:1"),))
    on_gpu.check_fits(large)
    decoder_on("cpu", checkpoint.decoder(), monkeypatch).check_fits(large)
