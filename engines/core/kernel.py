"""Attention on one device, and the type that every strategy takes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernel(Protocol):
    """Bidirectional attention: ``(q, k, v) -> (out, lse)``.

    ``q_BLHD``, ``k_BMHD`` and ``v_BMHD`` share batch, heads and head dim; the scale is ``D ** -0.5``. ``out_BLHD`` has
    the shape and dtype of ``q``; ``lse_BHL`` is the float32 natural log of the softmax denominators, with which partial
    results over disjoint keys are merged (Milakov & Gimelshein 2018, arXiv:1805.02867).
    """

    def __call__(self, q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]: ...
