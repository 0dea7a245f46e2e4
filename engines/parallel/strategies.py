"""The attention kernel of a team: nested strategies; ring attention and AllGather-KV."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.layout import TokenLayout
from engines.parallel.collectives import (
    Axis,
    all_gather,
    gather_masks,
    gather_places,
    join_masks,
    join_places,
    start_rotation,
    wait,
)
from engines.parallel.key_rows import CropKeys, fixed_rows
from engines.parallel.local_attention import finite
from engines.parallel.mesh import Team
from engines.parallel.ulysses import ulysses, ulysses_in_parts


def ring(kernels: tuple[Kernel | None, ...], axis: Axis) -> Kernel:
    """Return attention over the keys of every rank of the axis, one rank's share after another.

    ``kernels[j]`` attends to the valid rows of rank j's keys (None: skip that turn). The next share travels while
    attention works on the present one; partial results are merged in float32. Masks and places are small, so all are
    gathered before the first turn.
    """
    sources = tuple((axis.index - turn) % axis.size for turn in range(axis.size))
    turns = tuple(kernels[source] for source in sources)

    def ring_kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        masks_NBM = None if mask_BM is None else gather_masks(mask_BM, axis)
        places_NM = None if prefix is None else gather_places(prefix.place_M, axis)
        merged: tuple[Tensor, Tensor] | None = None
        current = torch.stack((k_BLGD, v_BLGD))
        for number, (source, turn) in enumerate(zip(sources, turns, strict=True)):
            last = number == len(turns) - 1
            arriving = current if last else start_rotation(current, axis)
            if turn is not None:
                mask = None if masks_NBM is None else masks_NBM[source]
                visible = None if prefix is None or places_NM is None else prefix._replace(place_M=places_NM[source])
                part = turn(q_BLHD, current[0], current[1], mask_BM=mask, prefix=visible)
                merged = _merge(merged, part, masked=mask is not None or visible is not None)
            current = current if last else wait(arriving)
        assert merged is not None, "every rank's keys are padding"
        return merged[0].to(q_BLHD.dtype), merged[1]

    return ring_kernel


def _merge(merged: tuple[Tensor, Tensor] | None, part: tuple[Tensor, Tensor], *, masked: bool) -> tuple[Tensor, Tensor]:
    return (part[0].float(), part[1]) if merged is None else merge(*merged, *part, masked=masked)


def merge(
    outA_BLHD: Tensor, lseA_BHL: Tensor, outB_BLHD: Tensor, lseB_BHL: Tensor, *, masked: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge attention results over two disjoint sets of keys (arXiv:1805.02867), in float32.

    ``masked``: either set, or both, may be empty, with an ``lse`` of -inf.
    """
    lse_BHL = torch.logaddexp(lseA_BHL, lseB_BHL)
    base_BHL = finite(lse_BHL) if masked else lse_BHL
    shareA_BLH1 = (lseA_BHL - base_BHL).exp().mT[..., None]
    shareB_BLH1 = (lseB_BHL - base_BHL).exp().mT[..., None]
    return outA_BLHD.float() * shareA_BLH1 + outB_BLHD.float() * shareB_BLH1, lse_BHL


def allgather_kv(kernel: Kernel, axis: Axis) -> Kernel:
    """Return ``kernel`` of this rank's queries over the keys of all ranks, in rank order. Any number of heads works."""

    def allgather_kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        all_N2BLGD = all_gather(torch.stack((k_BLGD, v_BLGD)), axis)
        k_BMGD, v_BMGD = all_N2BLGD.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind(0)
        mask_BM = None if mask_BM is None else join_masks(mask_BM, axis)
        prefix = None if prefix is None else prefix._replace(place_M=join_places(prefix.place_M, axis))
        return kernel(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)

    return allgather_kernel


def whole_queries(local: Kernel, team: Team, layout: TokenLayout, *, crop: CropKeys = fixed_rows) -> Kernel:
    """Return attention of queries that all ranks hold whole, each beside its chunk of the keys.

    Every rank attends to its own keys, and the results are merged: queries that are few cost less to exchange than
    keys. All ranks get the same bits.
    """
    axis = team.context
    if axis.size == 1:
        return local
    attend = _attention_to(local, layout, axis.index, 1, crop)
    is_padded = any(layout.valid_rows(rank, 1) == () for rank in range(axis.size))

    def kernel(
        q_BLHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        if attend is None:
            out_BLHD, lse_BHL = torch.zeros_like(q_BLHD), torch.full_like(q_BLHD[..., 0].mT, -torch.inf).float()
        else:
            out_BLHD, lse_BHL = attend(q_BLHD, k_BKGD, v_BKGD, mask_BM=mask_BM, prefix=prefix)
        parts_NBLHE = all_gather(torch.cat((out_BLHD.float(), lse_BHL.mT[..., None]), dim=-1), axis)
        first, *others = ((part[..., :-1], part[..., -1].mT) for part in parts_NBLHE)
        for other in others:
            first = merge(*first, *other, masked=is_padded or mask_BM is not None or prefix is not None)
        return first[0].to(q_BLHD.dtype), first[1]

    return kernel


def _attention_to(local: Kernel, layout: TokenLayout, first: int, num: int, crop: CropKeys) -> Kernel | None:
    """Return attention to the unpadded keys of some chunks; None if all of them are padding."""
    return None if layout.valid_rows(first, num) == () else crop(local, layout, first, num)


MakeKernel = Callable[[Kernel, Team, TokenLayout], Kernel]
"""Makes attention over the tokens of a team from attention on one device."""


def team_kernel(
    local: Kernel,
    team: Team,
    layout: TokenLayout,
    *,
    num_parts: int = 1,
    keeps_lse: bool = False,
    crop: CropKeys = fixed_rows,
) -> Kernel:
    """Return attention over the whole team's tokens: ulysses(ring(local)) or ulysses(allgather_kv(local)).

    The innermost kernel drops padded keys, because it knows which rows they are. With ``num_parts`` above 1, ulysses
    exchanges the heads in that many parts. With ``keeps_lse`` there is a log-sum-exp whatever the strategy, and one
    part.
    """
    inner = team.ulysses.size
    if team.ring.size > 1:
        turns = range(0, layout.num_chunks, inner)
        kernel = ring(tuple(_attention_to(local, layout, first, inner, crop) for first in turns), team.ring)
    else:
        kernel = crop(local, layout, 0, layout.num_chunks)
        kernel = allgather_kv(kernel, team.allgather_kv) if team.allgather_kv.size > 1 else kernel
    if inner == 1:
        return kernel
    if num_parts == 1 or keeps_lse:
        return ulysses(kernel, team.ulysses, keeps_lse=keeps_lse)
    return ulysses_in_parts(kernel, team.ulysses, num_parts)
