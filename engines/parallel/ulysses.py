"""Ulysses: tokens are split outside attention, heads inside (Jacobs et al. 2023, arXiv:2309.14509).

One fused all-to-all takes queries, keys and values from "my tokens, all heads" to "all tokens, my heads", one takes
the output back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.parallel.collectives import Axis, all_to_all
from engines.parallel.kernel import Kernel


def ulysses(kernel: Kernel, axis: Axis, *, with_lse: bool = False) -> Kernel:
    """``kernel`` on all the axis' tokens and a share of the heads. The number of heads must be a multiple of its size.

    ``lse`` of the result is empty unless ``with_lse``, because it costs a third exchange that only an enclosing merge
    would need.
    """

    def exchanged(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, /) -> tuple[Tensor, Tensor]:
        qkv_3BLHD = tokens_to_heads(torch.stack((q_BLHD, k_BLHD, v_BLHD)), axis)
        out_BLHD, lse_BHL = kernel(*qkv_3BLHD.unbind(0))
        lse = heads_to_tokens(lse_BHL.mT[..., None], axis)[..., 0].mT if with_lse else lse_BHL.new_empty(0)
        return heads_to_tokens(out_BLHD, axis), lse

    return exchanged


def tokens_to_heads(x_NBLHD: Tensor, axis: Axis) -> Tensor:
    """(…, my L tokens, all H heads, D) to (…, size·L tokens in rank order, H/size heads, D)."""
    num, batch, length, heads, dim = x_NBLHD.shape
    split = x_NBLHD.view(num, batch, length, axis.size, heads // axis.size, dim)
    received = all_to_all(split.permute(3, 0, 1, 2, 4, 5).contiguous(), axis)
    return received.permute(1, 2, 0, 3, 4, 5).reshape(num, batch, axis.size * length, heads // axis.size, dim)


def heads_to_tokens(x_BLHD: Tensor, axis: Axis) -> Tensor:
    """(B, size·L tokens, h heads, D) to (B, my L tokens, size·h heads, D): the inverse of ``tokens_to_heads``."""
    batch, length, heads, dim = x_BLHD.shape
    split = x_BLHD.reshape(batch, axis.size, length // axis.size, heads, dim)
    received = all_to_all(split.permute(1, 0, 2, 3, 4).contiguous(), axis)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, length // axis.size, axis.size * heads, dim)
