"""Clips that are decoded piece by piece, by causal auto-encoders: what their decoder kept of the frames before
comes along with the next."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from pipelines.blocks.pieces.bands import WHOLE, Share, band_alone

CACHE, FIRST = "feat_cache", "first_chunk"


def decodes_in_chunks(vae: Any) -> bool:
    """Returns whether ``vae`` decodes one latent frame after the other, and does not tile its pictures itself."""
    return CACHE in _arguments(vae) and not vae.use_tiling


def decode_chunks(vae: Any, latents_BCFHW: Tensor, share: Share = WHOLE) -> Iterator[Tensor]:
    """Yields the frames of each latent frame: together the very values of ``vae.decode`` of the whole. Of these only
    the rows of a ``share``, which can differ by rounding.

    The cache is the call's own, and not the module's.
    """
    cache: list[Any] = [None] * sum(1 for _ in vae.decoder.modules())
    knows_first = FIRST in _arguments(vae)
    hidden_BCFHW = vae.post_quant_conv(latents_BCFHW)
    for index in range(latents_BCFHW.shape[2]):
        first = {FIRST: index == 0} if knows_first else {}
        latent_BCFHW = hidden_BCFHW[:, :, index : index + 1]
        with band_alone(vae.decoder, share, latent_BCFHW.shape[-2]):
            patches_BCFHW = vae.decoder(latent_BCFHW, feat_cache=cache, feat_idx=[0], **first)
        yield _unpatched(patches_BCFHW, vae.config.get("patch_size") or 1).clamp(min=-1.0, max=1.0)


class PiecewiseVae:
    """Stands for a pipeline's auto-encoder: answers its first ``decode`` with the first chunk of what it was given,
    and each one after that with the next. ``num_left`` are still to come.
    """

    def __init__(self, vae: Any, share: Share) -> None:
        self._vae, self._share, self.num_left = vae, share, 0
        self._chunks: Iterator[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def decode(self, latents_BCFHW: Tensor, return_dict: bool = True) -> DecoderOutput:
        """A ``DecoderOutput``, which can be indexed as the tuple that callers without ``return_dict`` expect."""
        if self._chunks is None:
            self._chunks = decode_chunks(self._vae, latents_BCFHW, self._share)
            self.num_left = latents_BCFHW.shape[2]
        self.num_left -= 1
        return DecoderOutput(sample=next(self._chunks))


def _arguments(vae: Any) -> frozenset[str]:
    decoder = getattr(vae, "decoder", None)
    return frozenset() if decoder is None else frozenset(inspect.signature(decoder.forward).parameters)


def _unpatched(patches_BCFHW: Tensor, side: int) -> Tensor:
    """Squares of ``side`` pixels, which some auto-encoders hold as channels, with columns before rows."""
    batch, channels, frames, height, width = patches_BCFHW.shape
    squares = patches_BCFHW.reshape(batch, channels // side**2, side, side, frames, height, width)
    return squares.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * side, width * side)
