"""Ulysses: tokens are split outside attention, heads inside (Jacobs et al. 2023, arXiv:2309.14509).

One fused all-to-all takes queries, keys and values from "my tokens, all heads" to "all tokens, my heads", one takes
the output back. In parts, each takes a share of every rank's heads, and may travel while another share is attended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.kernel import Kernel
from engines.parallel.collectives import Axis, all_to_all, start_all_to_all, wait


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


def ulysses_in_parts(kernel: Kernel, axis: Axis, num_parts: int) -> Kernel:
    """``ulysses`` with the heads of each rank in ``num_parts`` shares (fewer, if they cannot be shared out evenly).

    Queries, keys and values lie with tokens first and side by side, so that attention reads what arrives through
    strides; ``kernel`` should take such tensors without a copy. No log-sum-exp.
    """

    def exchanged(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, /) -> tuple[Tensor, Tensor]:
        parts = _even_parts(q_BLHD.shape[2] // axis.size, num_parts)
        several = zip(*(_shares(x, axis.size, parts) for x in (q_BLHD, k_BLHD, v_BLHD)), strict=True)
        arriving = [start_all_to_all(torch.stack(share, dim=3).contiguous(), axis) for share in several]
        returning = [start_all_to_all(_attend_part(kernel, wait(part), axis), axis) for part in arriving]
        out_PWLBhD = torch.stack([wait(part) for part in returning])
        out_BLWPhD = out_PWLBhD.permute(3, 2, 1, 0, 4, 5)
        return out_BLWPhD.reshape(q_BLHD.shape), q_BLHD.new_empty(0)

    return exchanged


def _even_parts(heads: int, num_parts: int) -> int:
    return next(parts for parts in range(min(num_parts, heads), 0, -1) if heads % parts == 0)


def _shares(x_BLHD: Tensor, size: int, num_parts: int) -> tuple[Tensor, ...]:
    """One tensor a part, as it is sent: (destination, my tokens, batch, heads of one rank in one part, D)."""
    x_PWLBhD = torch.unflatten(x_BLHD, 2, (size, num_parts, -1)).permute(3, 2, 1, 0, 4, 5)
    return x_PWLBhD.unbind(0)


def _attend_part(kernel: Kernel, qkv_WLB3hD: Tensor, axis: Axis) -> Tensor:
    """Over all tokens; the result as it is sent back: (destination, its tokens, batch, heads, D)."""
    q_BLhD, k_BLhD, v_BLhD = qkv_WLB3hD.flatten(0, 1).transpose(0, 1).unbind(2)
    out_BLhD, _ = kernel(q_BLhD, k_BLhD, v_BLhD)
    return torch.unflatten(out_BLhD.transpose(0, 1), 0, (axis.size, -1)).contiguous()


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
