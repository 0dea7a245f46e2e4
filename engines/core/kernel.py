"""Attention on one device, and the type that every strategy takes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Prefix(NamedTuple):
    """How far each query sees, for sequences whose first tokens do not attend to later ones.

    A query attends to the keys whose place is below its ``reach_L``. ``reach_L`` is the own place plus 1 for a causal
    token, the group's end for tokens that see each other and all before, and the token count for full attention.
    ``place_M`` are the places of the keys. Both have an integer dtype.
    """

    reach_L: Tensor
    place_M: Tensor


class Kernel(Protocol):
    """Attention: ``(q, k, v) -> (out, lse)``, of every query to every key unless a mask or prefix is given.

    ``q_BLHD``, ``k_BMGD`` and ``v_BMGD`` share batch and head dim; the scale is ``D ** -0.5``. H is a multiple of G,
    and each key head serves H / G neighbouring query heads (arXiv:2305.13245). ``out_BLHD`` has the shape and dtype of
    ``q``. ``lse_BHL`` is the float32 natural log of the softmax denominators; it merges partial results over disjoint
    keys (Milakov & Gimelshein 2018, arXiv:1805.02867).

    ``mask_BM`` is True for attended keys (None: all). Where tokens are split, it covers the caller's keys only; either
    all ranks of a team pass a mask or none does. ``prefix`` limits how far the caller's queries see (None: to the end)
    and places the caller's keys in the whole sequence; again all ranks pass it or none. A query without any key has an
    ``lse`` of -inf and a finite, meaningless ``out``.
    """

    def __call__(
        self,
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]: ...
