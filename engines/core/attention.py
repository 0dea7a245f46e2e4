"""Attention on one device as every strategy takes it, and shares of heads per rank. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Prefix(NamedTuple):
    """How far each query sees, for sequences whose first tokens do not attend to later ones.

    A query attends to the keys whose place is below its ``reach_L``. Both fields have an integer dtype.
    """

    reach_L: Tensor
    """Own place plus 1 for a causal token, group end for a bidirectional group, token count for full attention."""
    place_M: Tensor
    """Places of the keys."""


class Kernel(Protocol):
    """Attention: ``(q, k, v) -> (out, lse)``, of every query to every key unless a mask or prefix is given.

    ``q_BLHD``, ``k_BMGD`` and ``v_BMGD`` share batch and head dim; the scale is ``D ** -0.5``. H is a multiple of G,
    and each key head serves H / G neighbouring query heads (arXiv:2305.13245). ``out_BLHD`` has the shape and dtype of
    ``q``. ``lse_BHL`` is the float32 natural log of the softmax denominators. It merges partial results over disjoint
    keys (Milakov & Gimelshein 2018, arXiv:1805.02867).

    ``mask_BM`` is True for attended keys (None: all). If tokens are split, it covers the caller's keys only. ``prefix``
    limits the keys that the caller's queries see (None: all), and places the caller's keys in the whole sequence.
    All ranks of a team pass a mask or none does; likewise a prefix. A query without any key has an ``lse`` of -inf and
    a finite, meaningless ``out``.
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


@dataclass(frozen=True, slots=True, eq=False)
class EarlyKernel:
    """A kernel that can exchange keys and values while the caller still makes the queries."""

    attend: Kernel
    """Attention with everything given at once."""
    send: Callable[[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]
    """Starts to send ``k_BMGD`` and ``v_BMGD``. Returns attention to them, ``q_BLHD -> out_BLHD``, without mask and
    prefix; the caller runs it once, before it sends others. The third tensor, from which queries will be made, keeps
    compilers from making them first."""

    def __call__(
        self,
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.attend(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)


def send_keys(kernel: Kernel, k_BMGD: Tensor, v_BMGD: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
    """Return attention to these keys, ``q_BLHD -> out_BLHD``. An ``EarlyKernel`` starts to send them.

    Queries are made from ``source`` after this call.
    """
    if isinstance(kernel, EarlyKernel):
        return kernel.send(k_BMGD, v_BMGD, source)
    return lambda q_BLHD: kernel(q_BLHD, k_BMGD, v_BMGD)[0]


class HeadShare(NamedTuple):
    """The query and key heads of each of ``num_ranks`` ranks, zero padding at the end included.

    Every key head is first repeated ``repeats`` times in a row.
    """

    num_ranks: int
    queries: int
    keys: int
    repeats: int

    @property
    def all_queries(self) -> int:
        return self.num_ranks * self.queries

    @property
    def all_keys(self) -> int:
        return self.num_ranks * self.keys


def heads_of_one(num_heads: int, num_ranks: int) -> int:
    """Return the heads of each rank in equal shares, rounded up."""
    return -(-num_heads // num_ranks)


def share_heads(num_heads: int, num_key_heads: int, num_ranks: int) -> HeadShare:
    """Return equal shares of ``num_heads`` query heads, with the ``num_key_heads`` key heads that they need.

    Minimises query heads per rank, which cost attention time, then key heads. 32 and 8 heads on 4 ranks are 8 and 2
    each. On 16 ranks they are 2 and 1, each key head twice. 30 on 4 ranks are 8 each, two of them padding. Raises
    ValueError if ``num_heads`` is no multiple of ``num_key_heads``.
    """
    if num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_key_heads} key heads: it must be a multiple")
    group = num_heads // num_key_heads
    best: HeadShare | None = None
    for repeats in range(1, group + 1):
        if group % repeats:
            continue
        keys = heads_of_one(num_key_heads * repeats, num_ranks)
        share = HeadShare(num_ranks=num_ranks, queries=keys * (group // repeats), keys=keys, repeats=repeats)
        if best is None or (share.queries, share.keys) < (best.queries, best.keys):
            best = share
    assert best is not None
    return best
