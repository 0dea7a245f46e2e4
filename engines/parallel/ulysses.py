"""Ulysses: tokens are split outside attention, heads inside (Jacobs et al. 2023, arXiv:2309.14509).

One fused all-to-all moves queries, keys and values from "my tokens, all heads" to "all tokens, my heads"; another one
returns the output. With several parts, one part of the heads travels while attention works on another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.attention import HeadShare, Kernel, Prefix, share_heads
from engines.parallel.collectives import Axis, all_to_all, join_masks, join_places, start_all_to_all, wait
from engines.parallel.local_attention import repeat_heads

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A kernel with mask and prefix already bound."""


def ulysses(kernel: Kernel, axis: Axis, *, keeps_lse: bool = False) -> Kernel:
    """Return ``kernel`` on all tokens of the axis and a share of the heads.

    Queries of another stream than the keys are the same on every rank and stay whole. Heads are padded with zeros to a
    multiple of the axis' size; too few key heads are repeated (see ``share_heads``). Without ``keeps_lse``, the
    result's ``lse`` is empty: it costs a third exchange, of one float32 per token and head.
    """

    def ulysses_kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_heads = q_BLHD.shape[2]
        mask_BM, prefix = _gather_masking(mask_BM, prefix, axis)
        qkv_BMhD = _tokens_to_heads(q_BLHD, k_BLGD, v_BLGD, axis)
        out_BMhD, lse_BhM = kernel(*qkv_BMhD, mask_BM=mask_BM, prefix=prefix)
        out_BLHD = first(heads_to_tokens(out_BMhD, axis), num_heads, dim=2)
        if not keeps_lse:
            return out_BLHD, lse_BhM.new_empty(0)
        lse_BLH1 = heads_to_tokens(lse_BhM.mT[..., None], axis)
        return out_BLHD, first(lse_BLH1[..., 0].mT, num_heads, dim=1)

    return ulysses_kernel


def ulysses_in_parts(kernel: Kernel, axis: Axis, num_parts: int) -> Kernel:
    """Return ``ulysses`` with each rank's heads in ``num_parts`` parts, or fewer if they cannot be split evenly.

    Queries, keys and values lie tokens first and side by side, so attention reads received tensors through strides.
    ``kernel`` should take such tensors without a copy. There is no log-sum-exp.
    """

    def ulysses_kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, length, num_heads, dim = q_BLHD.shape
        if length != k_BLGD.shape[1]:
            return ulysses(kernel, axis)(q_BLHD, k_BLGD, v_BLGD, mask_BM=mask_BM, prefix=prefix)
        mask_BM, prefix = _gather_masking(mask_BM, prefix, axis)
        attend = partial(kernel, mask_BM=mask_BM, prefix=prefix)
        share = share_heads(num_heads, k_BLGD.shape[2], axis.size)
        parts = _even_parts(share.keys, num_parts)
        heads = (share.queries // parts, share.keys // parts)
        several = zip(*(_parts(x, axis.size, parts) for x in spread_heads(q_BLHD, k_BLGD, v_BLGD, share)), strict=True)
        arriving = [start_all_to_all(torch.cat(qkv, dim=3).contiguous(), axis) for qkv in several]
        attended = (_attend_part(attend, wait(part), axis, heads) for part in arriving)
        returning = [start_all_to_all(part, axis) for part in attended]
        out_PWLBhD = torch.stack([wait(part) for part in returning])
        out_BLHD = out_PWLBhD.permute(3, 2, 1, 0, 4, 5).reshape(batch, length, share.all_queries, dim)
        return first(out_BLHD, num_heads, dim=2), q_BLHD.new_empty(0)

    return ulysses_kernel


def spread_heads(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, share: HeadShare) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat and pad heads by ``share``: rank r gets the r-th equal part of each. Even heads are unchanged."""
    k_BLKD, v_BLKD = (_pad_heads(repeat_heads(x_BLGD, share.repeats), share.all_keys) for x_BLGD in (k_BLGD, v_BLGD))
    return _pad_heads(q_BLHD, share.all_queries), k_BLKD, v_BLKD


def first(x: Tensor, num: int, *, dim: int) -> Tensor:
    """Return the first ``num`` heads along ``dim``, without padding. Empty tensors stay empty."""
    return x.narrow(dim, 0, num) if x.ndim > dim and x.shape[dim] > num else x


def _pad_heads(x_BLHD: Tensor, num_heads: int) -> Tensor:
    missing = num_heads - x_BLHD.shape[2]
    return functional.pad(x_BLHD, (0, 0, 0, missing)) if missing else x_BLHD


def _even_parts(heads: int, num_parts: int) -> int:
    return next(parts for parts in range(min(num_parts, heads), 0, -1) if heads % parts == 0)


def _parts(x_BLHD: Tensor, size: int, num_parts: int) -> tuple[Tensor, ...]:
    """Return one tensor per part, as sent: (destination, own tokens, batch, heads of one rank in one part, D)."""
    x_PWLBhD = torch.unflatten(x_BLHD, 2, (size, num_parts, -1)).permute(3, 2, 1, 0, 4, 5)
    return x_PWLBhD.unbind(0)


def _gather_masking(mask_BM: Tensor | None, prefix: Prefix | None, axis: Axis) -> tuple[Tensor | None, Prefix | None]:
    mask_BM = None if mask_BM is None else join_masks(mask_BM, axis)
    return mask_BM, None if prefix is None else Prefix(*(join_places(places, axis) for places in prefix))


def _attend_part(attend: Attend, qkv_WLBhD: Tensor, axis: Axis, heads: tuple[int, int]) -> Tensor:
    """Attend over all tokens with ``heads`` query and key heads; return (destination, its tokens, B, heads, D)."""
    queries, keys = heads
    q_BMhD, k_BMgD, v_BMgD = torch.split(qkv_WLBhD.flatten(0, 1).transpose(0, 1), [queries, keys, keys], dim=2)
    out_BMhD, _ = attend(q_BMhD, k_BMgD, v_BMgD)
    return torch.unflatten(out_BMhD.transpose(0, 1), 0, (axis.size, -1)).contiguous()


def _tokens_to_heads(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's heads, in one exchange; in two if queries and keys are of different streams."""
    if q_BLHD.shape[1] != k_BLGD.shape[1]:
        q_BLHD, k_BLGD, v_BLGD = spread_heads(
            q_BLHD, k_BLGD, v_BLGD, share_heads(q_BLHD.shape[2], k_BLGD.shape[2], axis.size)
        )
        keys_and_values = tokens_to_heads(torch.stack((k_BLGD, v_BLGD)), axis)
        return tokens_to_heads(q_BLHD[None], axis)[0], *keys_and_values.unbind(0)
    if q_BLHD.shape[2] == k_BLGD.shape[2] and q_BLHD.shape[2] % axis.size == 0:
        return tokens_to_heads(torch.stack((q_BLHD, k_BLGD, v_BLGD)), axis).unbind(0)
    share = share_heads(q_BLHD.shape[2], k_BLGD.shape[2], axis.size)
    split = [torch.unflatten(x, 2, (axis.size, -1)) for x in spread_heads(q_BLHD, k_BLGD, v_BLGD, share)]
    sent_WBLhD = torch.cat(split, dim=3).permute(2, 0, 1, 3, 4).contiguous()
    arrived_BMhD = all_to_all(sent_WBLhD, axis).transpose(0, 1).flatten(1, 2)
    return torch.split(arrived_BMhD, [share.queries, share.keys, share.keys], dim=2)


def tokens_to_heads(x_NBLHD: Tensor, axis: Axis) -> Tensor:
    """Exchange (…, own L tokens, all H heads, D) for (…, size·L tokens in rank order, H/size heads, D)."""
    num, batch, length, heads, dim = x_NBLHD.shape
    split = x_NBLHD.view(num, batch, length, axis.size, heads // axis.size, dim)
    received = all_to_all(split.permute(3, 0, 1, 2, 4, 5).contiguous(), axis)
    return received.permute(1, 2, 0, 3, 4, 5).reshape(num, batch, axis.size * length, heads // axis.size, dim)


def heads_to_tokens(x_BLHD: Tensor, axis: Axis) -> Tensor:
    """Exchange (B, size·L tokens, h heads, D) for (B, own L tokens, size·h heads, D); undoes ``tokens_to_heads``."""
    batch, length, heads, dim = x_BLHD.shape
    split = x_BLHD.reshape(batch, axis.size, length // axis.size, heads, dim)
    received = all_to_all(split.permute(1, 0, 2, 3, 4).contiguous(), axis)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, length // axis.size, axis.size * heads, dim)
