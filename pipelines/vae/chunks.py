"""Clips that are decoded piece by piece, by causal auto-encoders: what their decoder kept of the frames before
comes along with the next."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from pipelines.vae.bands import Share, band_alone

CACHE, FIRST = "feat_cache", "first_chunk"
MIN_BAND_ROWS = 15
"""Of latents: four bands of 480 pixels, each 38 % of the work. With thinner ones all compute what is around them."""


def decodes_in_chunks(vae: Any) -> bool:
    """Returns whether ``vae`` decodes one latent frame after the other, and does not tile its pictures itself."""
    return CACHE in _arguments(vae) and not vae.use_tiling


def decode_chunks(vae: Any, latents_BCFHW: Tensor, decoders: Sequence[Any] = ()) -> Iterator[Tensor]:
    """Yields the frames of each latent frame: together the very values of ``vae.decode`` of the whole.

    With ``decoders``, that of ``vae`` and copies of it on other devices, as many decode a band of rows each as there
    are rows for: the same values up to rounding, where the latents were.
    """
    num_bands = min(len(decoders), latents_BCFHW.shape[-2] // MIN_BAND_ROWS)
    return decode_bands(vae, latents_BCFHW, decoders[:num_bands] if num_bands > 1 else (vae.decoder,))


def decode_bands(vae: Any, latents_BCFHW: Tensor, decoders: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the same, with a band on each of ``decoders``, however few its rows are.

    One thread has one device after the other begin with a chunk: calls on GPUs return long before their work is done.
    """
    hidden_BCFHW, count = getattr(vae, "post_quant_conv", nn.Identity())(latents_BCFHW), len(decoders)
    bands = [
        _decode_band(vae, decoder, hidden_BCFHW.to(_device(decoder)), Share(index=index, count=count))
        for index, decoder in enumerate(decoders)
    ]
    for rows in zip(*bands, strict=True):
        yield rows[0] if count == 1 else torch.cat([each.to(latents_BCFHW.device) for each in rows], -2)


def _decode_band(vae: Any, decoder: Any, hidden_BCFHW: Tensor, share: Share) -> Iterator[Tensor]:
    """The cache is the call's own, and not the module's."""
    cache: list[Any] = [None] * sum(1 for _ in decoder.modules())
    knows_first = FIRST in _arguments(vae)
    for index in range(hidden_BCFHW.shape[2]):
        first = {FIRST: index == 0} if knows_first else {}
        latent_BCFHW = hidden_BCFHW[:, :, index : index + 1]
        with band_alone(decoder, share, latent_BCFHW.shape[-2]):
            patches_BCFHW = decoder(latent_BCFHW, feat_cache=cache, feat_idx=[0], **first)
        yield _unpatched(patches_BCFHW, vae.config.get("patch_size") or 1).clamp(min=-1.0, max=1.0)


class PiecewiseVae:
    """Stands for a pipeline's auto-encoder: answers its first ``decode`` with the first chunk of what it was given,
    and each one after that with the next. ``num_left`` are still to come. ``decoders`` as for ``decode_chunks``.
    """

    def __init__(self, vae: Any, decoders: Sequence[Any] = ()) -> None:
        self._vae, self._decoders, self.num_left = vae, decoders, 0
        self._chunks: Iterator[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def decode(self, latents_BCFHW: Tensor, return_dict: bool = True) -> DecoderOutput:
        """A ``DecoderOutput``, which can be indexed as the tuple that callers without ``return_dict`` expect."""
        if self._chunks is None:
            self._chunks = decode_chunks(self._vae, latents_BCFHW, self._decoders)
            self.num_left = latents_BCFHW.shape[2]
        self.num_left -= 1
        return DecoderOutput(sample=next(self._chunks))


def _device(decoder: Any) -> torch.device:
    device: torch.device = next(decoder.parameters()).device
    return device


def _arguments(vae: Any) -> frozenset[str]:
    decoder = getattr(vae, "decoder", None)
    return frozenset() if decoder is None else frozenset(inspect.signature(decoder.forward).parameters)


def _unpatched(patches_BCFHW: Tensor, side: int) -> Tensor:
    """Squares of ``side`` pixels, which some auto-encoders hold as channels, with columns before rows."""
    batch, channels, frames, height, width = patches_BCFHW.shape
    squares = patches_BCFHW.reshape(batch, channels // side**2, side, side, frames, height, width)
    return squares.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * side, width * side)
