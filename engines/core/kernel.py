"""Attention on one device, and the type that every strategy takes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Prefix(NamedTuple):
    """How far each query sees, where tokens at the beginning of a sequence do not see what comes after them.

    A query attends to the keys whose place in the sequence is below its ``reach_L``: its own place and 1 for a token
    that attends causally, the end of the group for tokens that see each other and all before them, the number of all
    tokens for those that see everything. ``place_M`` are the places of the keys. Both are of an integer dtype.
    """

    reach_L: Tensor
    place_M: Tensor


class Kernel(Protocol):
    """Attention: ``(q, k, v) -> (out, lse)``, of every query to every key unless something else is said.

    ``q_BLHD``, ``k_BMGD`` and ``v_BMGD`` share batch and head dim; the scale is ``D ** -0.5``. H is a multiple of G,
    and each key head serves H / G neighbouring query heads (arXiv:2305.13245). ``out_BLHD`` has the shape and dtype of
    ``q``; ``lse_BHL`` is the float32 natural log of the softmax denominators, with which partial results over disjoint
    keys are merged (Milakov & Gimelshein 2018, arXiv:1805.02867).

    ``mask_BM`` is True for the keys that are attended (None: all are), like k and v the caller's own where tokens are
    split; the ranks of a team pass one all or none. ``prefix`` says how far each of the caller's queries sees (None: to
    the end), and where the caller's keys are in the whole sequence; it too is passed by all ranks or none. A query
    without any key has an ``lse`` of -inf, and a finite ``out`` that means nothing.
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
