"""A picture decoded on several devices, in bands of rows, against diffusers' own decoding of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from pipelines.loading import resolve_path
from pipelines.vae import layers, strips
from pipelines.vae.known import is_known_middle
from tests.pipelines.vae.test_strips import EXACT_DB, decibels, tiny_vae


def copies(decoder: Any, count: int) -> list[Any]:
    return [decoder, *(copy.deepcopy(decoder) for _ in range(1, count))]


def uneven(height: int, *, batch: int = 1) -> Tensor:
    """Latents whose rows differ in mean and strength, and so do bands."""
    latents_BCHW = torch.randn(batch, 4, height, 9, generator=torch.Generator().manual_seed(1))
    return latents_BCHW * torch.linspace(0.2, 2, height)[:, None] + torch.linspace(-1, 1, height)[:, None]


@pytest.mark.parametrize("strip_bytes", [1, 5000, strips.UNLIMITED_BYTES])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bands_are_the_rows_of_the_whole(count: int, strip_bytes: int) -> None:
    decoder, latents_BCHW = tiny_vae().decoder, uneven(13, batch=2)
    bands = strips.decode_in_bands(copies(decoder, count), latents_BCHW, strip_bytes)
    assert decibels(bands, decoder(latents_BCHW)) > EXACT_DB


def test_a_middle_without_attention() -> None:
    decoder = tiny_vae(mid_block_add_attention=False).decoder
    bands = strips.decode_in_bands(copies(decoder, 2), uneven(8))
    assert decibels(bands, decoder(uneven(8))) > EXACT_DB


def test_a_shipped_model_paints_the_same() -> None:
    vae = AutoencoderKL.from_pretrained(resolve_path("flux-shapes") / "vae").requires_grad_(False)
    latents_BCHW = torch.randn(1, vae.config.latent_channels, 25, 12, generator=torch.Generator().manual_seed(1))
    assert is_known_middle(vae.decoder.mid_block)
    bands = strips.decode_in_bands(copies(vae.decoder, 3), latents_BCHW)
    assert decibels(bands, vae.decoder(latents_BCHW)) > EXACT_DB


def test_bands_of_bfloat16_are_as_near_to_the_truth_as_the_whole() -> None:
    decoder, latents_BCHW = tiny_vae().decoder, uneven(16)
    truth, halves = decoder(latents_BCHW), latents_BCHW.bfloat16()
    decoder = decoder.bfloat16()
    whole_db = decibels(decoder(halves), truth)
    assert decibels(strips.decode_in_bands(copies(decoder, 2), halves), truth) > whole_db - 1


def no_edges(bands: Sequence[Tensor]) -> list[Any]:
    return [(None, None)] * len(bands)


def own_statistics(moments: Sequence[Tensor]) -> Tensor:
    return moments[0][1:]


def own_pixels(attention: Any, x_BCHW: Tensor, own_BCHW: Tensor, all_BCHW: Tensor) -> Tensor:
    return ATTENDED(attention, x_BCHW, own_BCHW, own_BCHW)


ATTENDED = layers._attended
FAULTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"_edges": no_edges, "_together": own_statistics, "_attended": own_pixels}
)


@pytest.mark.parametrize("name", FAULTS)
def test_bands_that_know_nothing_of_each_other_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_vae().decoder
    monkeypatch.setattr(layers, name, FAULTS[name])
    assert decibels(strips.decode_in_bands(copies(decoder, 2), uneven(16)), decoder(uneven(16))) < 60


def test_the_rows_say_how_many_devices_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, calls = tiny_vae().decoder, list[tuple[int, int]]()
    whole = decoder(uneven(2 * strips.MIN_BAND_ROWS))
    real = strips.decode_in_bands

    def watched(decoders: Sequence[Any], latents_BCHW: Tensor, strip_bytes: int) -> Tensor:
        calls.append((len(decoders), strip_bytes))
        return real(decoders, latents_BCHW, strip_bytes)

    monkeypatch.setattr(strips, "decode_in_bands", watched)
    least = uneven(2 * strips.MIN_BAND_ROWS)
    fewer = least[:, :, 1:]
    as_ever = decoder(fewer)
    half_bytes = strips.whole_bytes(decoder, least) // 2
    for limit_bytes, strip_bytes in ((None, strips.UNLIMITED_BYTES), (half_bytes, strips.UNLIMITED_BYTES), (1, 2**26)):
        divided = copies(decoder, 3)
        strips.divide(divided, limit_bytes, lambda _: False)
        assert decibels(divided[0](least), whole) > EXACT_DB
        assert calls.pop() == (2, strip_bytes)
        assert torch.equal(divided[0](fewer), as_ever)
        assert not calls
        decoder.__dict__.pop("forward")


def test_what_one_device_is_ready_for_stays_there_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, calls = tiny_vae().decoder, list[int]()
    real = strips.decode_in_bands
    monkeypatch.setattr(strips, "MIN_BAND_ROWS", 2)
    monkeypatch.setattr(strips, "decode_in_bands", lambda *args: calls.append(len(args[0])) or real(*args))
    ready, other = uneven(8), uneven(9)
    num_bytes = strips.whole_bytes(decoder, ready)
    for limit_bytes, counts in ((None, [2]), (num_bytes, [2]), (num_bytes - 1, [2, 2])):
        calls.clear()
        divided = copies(decoder, 2)
        strips.divide(divided, limit_bytes, lambda sample: sample.shape == ready.shape)
        for latents_BCHW in (ready, other):
            divided[0](latents_BCHW)
        assert calls == counts
        decoder.__dict__.pop("forward")
