"""Attention in exports: hybrid attention without process groups, and TensorRT's own multi-device attention.

TensorRT silently ignores ``groups``, so every exchange of the hybrid spans the whole team. With u·r ranks, rank
(jr, ju) computes head group ju: a 1/r share of every rank's query rows over all keys. Queries and results are sent
once. Keys and values are sent r times, a cost that ring attention would save.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.attention import Kernel, Prefix, share_heads
from engines.core.layout import TokenLayout
from engines.parallel.collectives import Axis, all_to_all
from engines.parallel.local_attention import as_many_as, crop_keys
from engines.parallel.mesh import Team
from engines.parallel.ulysses import first, spread_heads


def group_free_kernel(local: Kernel, team: Team, layout: TokenLayout) -> Kernel:
    """Return ``local`` over all tokens: heads in ``ulysses`` groups, queries in ``ring × allgather_kv`` shares.

    The kernel supports no mask and no prefix.
    """
    num_groups, num_shares = team.ulysses.size, team.ring.size * team.allgather_kv.size
    cropped = crop_keys(local, layout.valid_rows(0, layout.num_chunks))

    def kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert mask_BM is None
        assert prefix is None
        share = share_heads(q_BLHD.shape[2], k_BLGD.shape[2], num_groups)
        qkv = spread_heads(q_BLHD, k_BLGD, v_BLGD, share)
        out_BLHD, lse = _exchange(cropped, team.context, num_groups, num_shares, qkv)
        return first(out_BLHD, q_BLHD.shape[2], dim=2), lse

    return kernel


def _exchange(
    local: Kernel, axis: Axis, num_groups: int, num_shares: int, qkv_BLHD: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    q_BLHD, k_BLHD, v_BLHD = qkv_BLHD
    batch, length, heads, dim = q_BLHD.shape
    q_BLHD = _pad_queries(q_BLHD, num_shares)
    share, group, key_group = q_BLHD.shape[1] // num_shares, heads // num_groups, k_BLHD.shape[2] // num_groups
    q_RBSUhD = q_BLHD.reshape(batch, num_shares, share, num_groups, group, dim).movedim(1, 0)
    q_NBShD = q_RBSUhD.movedim(3, 1).reshape(axis.size, batch, share, group, dim)
    kv_2BLUhD = torch.stack((k_BLHD, v_BLHD)).reshape(2, batch, length, num_groups, key_group, dim)
    kv_U2BLhD = kv_2BLUhD.movedim(3, 0)
    kv_N2BLhD = kv_U2BLhD.repeat(num_shares, 1, 1, 1, 1, 1)
    queries_BShD = all_to_all(q_NBShD.contiguous(), axis).movedim(0, 1).flatten(1, 2)
    keys_BLhD, values_BLhD = all_to_all(kv_N2BLhD.contiguous(), axis).movedim(0, 2).flatten(2, 3).unbind(0)
    out_BShD, lse = local(queries_BShD, keys_BLhD, values_BLhD)
    out_NBShD = out_BShD.reshape(batch, axis.size, share, group, dim).movedim(1, 0)
    back_NBShD = all_to_all(out_NBShD.contiguous(), axis)
    back_RUBShD = back_NBShD.reshape(num_shares, num_groups, batch, share, group, dim)
    back_BLHD = back_RUBShD.permute(2, 0, 3, 1, 4, 5).reshape(batch, num_shares * share, heads, dim)
    return back_BLHD[:, :length], lse


def _pad_queries(q_BLHD: Tensor, num_shares: int) -> Tensor:
    """Pad queries to a multiple of ``num_shares``. A symbolic length is already one, as the tracer checks."""
    length = q_BLHD.shape[1]
    if not isinstance(length, int) or length % num_shares == 0:
        return q_BLHD
    return functional.pad(q_BLHD, (0, 0, 0, 0, 0, -length % num_shares))


@torch.library.custom_op("troupe::ring_attention", mutates_args=())
def ring_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, num_ranks: int) -> Tensor:
    """Mark attention over the keys of all ranks. It runs only in TensorRT."""
    raise NotImplementedError("troupe::ring_attention only runs inside TensorRT")


@ring_attention.register_fake
def _(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, num_ranks: int) -> Tensor:
    return torch.empty_like(q_BHLD, memory_format=torch.contiguous_format)


RING_ATTENTION = torch.ops.troupe.ring_attention.default


def native_ring_kernel(team: Team, layout: TokenLayout) -> Kernel:
    """Return TensorRT's ring as a kernel, which supports no mask and no prefix.

    Raises ValueError if tokens do not divide evenly, since the node cannot skip padding.
    """
    if layout.valid_rows(0, layout.num_chunks) is not None:
        raise ValueError(
            f"TensorRT's ring over {team.ring.size} ranks needs token numbers that divide by it, not "
            f"{dict(layout.lengths)}: use another size, or ulysses or allgather_kv"
        )

    def kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert mask_BM is None
        assert prefix is None
        qkv_BLHD = (q_BLHD, *as_many_as(q_BLHD, k_BLGD, v_BLGD))
        q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2).contiguous() for x in qkv_BLHD)
        out_BHLD: Tensor = RING_ATTENTION(q_BHLD, k_BHLD, v_BHLD, team.ring.size)
        return out_BHLD.transpose(1, 2), q_BLHD.new_empty(0)

    return kernel
