"""Frames decoded in bands of their rows, against diffusers' own decoding of the whole."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.blocks.pieces import bands
from pipelines.blocks.pieces.bands import Share, margins
from pipelines.blocks.pieces.chunks import decode_chunks
from tests.pipelines.blocks.test_chunks import VAES, painted

NUM_ROWS = 32
"""Of latents: enough that a band is cut on both of its sides."""


def latents() -> Tensor:
    return torch.randn(1, 4, 2, NUM_ROWS, 3, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def joined(vae: torch.nn.Module, count: int) -> Tensor:
    return torch.cat(
        [torch.cat(list(decode_chunks(vae, latents(), Share(index=index, count=count))), 2) for index in range(count)],
        3,
    )


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
        next(decode_chunks(vae, latents(), Share(index=1, count=2)))
        assert torch.equal(vae.decode(latents(), return_dict=False)[0], whole)


def test_frames_of_a_job_come_in_bands(tiny_wan: Path) -> None:
    decoder, latents, request = painted(tiny_wan)
    whole = decoder.decode(latents, request)
    shares = [decoder.decode_chunks(latents, request, Share(index=index, count=2)) for index in range(2)]
    rows = [np.concatenate([chunk.frames_FHWC for chunk in chunks]) for chunks in shares]
    np.testing.assert_allclose(np.concatenate(rows, 1).astype(int), whole.astype(int), atol=1)
