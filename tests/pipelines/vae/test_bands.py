"""Frames decoded in bands of their rows, against diffusers' own decoding of the whole."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pipelines.vae import bands, chunks
from pipelines.vae.bands import margins
from pipelines.vae.chunks import decode_bands, decode_chunks
from tests.pipelines.vae.test_chunks import VAES

NUM_ROWS = 31
"""Of latents: enough that a band is cut on both of its sides, and uneven ones."""


def latents() -> Tensor:
    return torch.randn(1, 4, 2, NUM_ROWS, 3, generator=torch.Generator().manual_seed(1))


def copies(vae: Any, count: int) -> list[Any]:
    return [vae.decoder, *(copy.deepcopy(vae.decoder) for _ in range(1, count))]


@torch.no_grad()
def joined(vae: Any, count: int) -> Tensor:
    return torch.cat(list(decode_bands(vae, latents(), copies(vae, count))), 2)


def noise_ratio_db(pixels: Tensor, whole: Tensor) -> float:
    return float(10 * torch.log10(4.0 / (pixels - whole).double().square().mean()))


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_bands_are_the_rows_of_the_whole(name: str) -> None:
    vae = VAES[name]()
    whole = vae.decode(latents(), return_dict=False)[0]
    for count in (2, 3):
        assert joined(vae, count).shape == whole.shape
        assert noise_ratio_db(joined(vae, count), whole) > 100
    narrow = tuple(margin // 2 for margin in margins(vae.decoder))
    with patch.object(bands, "margins", lambda _: narrow):
        assert noise_ratio_db(joined(vae, 2), whole) < 80, "rows around a band do not matter"


def test_margins_are_small_where_the_work_is() -> None:
    """Of the published layout: three residual blocks a level, the first three followed by one convolution."""
    import diffusers

    with torch.device("meta"):
        decoder = diffusers.AutoencoderKLWan().decoder
    assert margins(decoder) == (14, 13, 11, 7, 1)


def test_a_decoder_is_the_same_after_a_band() -> None:
    vae = VAES["wan 2.1"]()
    with torch.no_grad():
        whole = vae.decode(latents(), return_dict=False)[0]
        next(decode_bands(vae, latents(), copies(vae, 2)))
        assert torch.equal(vae.decode(latents(), return_dict=False)[0], whole)


@torch.no_grad()
def test_the_rows_say_how_many_devices_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(chunks, "decode_bands", lambda vae, latents, decoders: counts.append(len(decoders)) or iter(()))
    vae = VAES["wan 2.1"]()
    for num_rows in (14, 15, 29, 30, 44, 45, 90):
        latents = torch.zeros(1, 4, 2, num_rows, 3)
        list(decode_chunks(vae, latents, copies(vae, 3)))
        list(decode_chunks(vae, latents))
    assert counts[::2] == [1, 1, 1, 2, 2, 3, 3]
    assert set(counts[1::2]) == {1}
