"""Attention in which ranks write into each other's memory: to a compiler it is one operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engines.core.kernel import Kernel, Prefix
from engines.core.resources import rank_resources

PeerAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q_BLHD, k_BKGD, v_BKGD) -> out_BLHD``, contiguous: my queries over the keys of all ranks."""


class PeerOperations(list[PeerAttention]):
    """The operations of a rank, by their number in the graph of a compiled module.

    None is dropped before the rank ends: a captured step may hold its memory.
    """


def one_operation(attention: PeerAttention) -> Kernel:
    """A kernel without LSE, mask and prefix, for ranks that all make the same calls."""
    operations = rank_resources().get(PeerOperations)
    number = len(operations)
    operations.append(attention)

    def exchanged(
        q_BLHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert mask_BM is None
        assert prefix is None
        return _run(q_BLHD, k_BKGD, v_BKGD, number), q_BLHD.new_empty(0)

    return exchanged


@torch.library.custom_op("troupe::peer_attention", mutates_args=())
def _run(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, number: int) -> Tensor:
    return rank_resources().get(PeerOperations)[number](q_BLHD, k_BKGD, v_BKGD)


@_run.register_fake
def _(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, number: int) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)
