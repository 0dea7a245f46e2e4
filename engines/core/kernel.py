"""Attention on one device, and the type that every strategy takes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernel(Protocol):
    """Bidirectional attention: ``(q, k, v) -> (out, lse)``.

    ``q_BLHD``, ``k_BMGD`` and ``v_BMGD`` share batch and head dim; the scale is ``D ** -0.5``. H is a multiple of G,
    and each key head serves H / G neighbouring query heads (arXiv:2305.13245). ``out_BLHD`` has the shape and dtype of
    ``q``; ``lse_BHL`` is the float32 natural log of the softmax denominators, with which partial results over disjoint
    keys are merged (Milakov & Gimelshein 2018, arXiv:1805.02867).

    ``mask_BM`` is True for the keys that are attended (None: all are), like k and v the caller's own where tokens are
    split; the ranks of a team pass one all or none. An entry of the batch without any key has an ``lse`` of -inf, and a
    finite ``out`` that means nothing.
    """

    def __call__(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...
