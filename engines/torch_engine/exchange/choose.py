"""Attention of models that run as their module: how a team exchanges heads, by the length of the step."""

from __future__ import annotations

from functools import partial

import torch

from engines.core.kernel import Kernel
from engines.core.layout import TokenLayout
from engines.parallel.mesh import Team
from engines.parallel.strategy import MakeKernel, team_kernel
from engines.torch_engine.exchange.heads import local_attention
from engines.torch_engine.exchange.peer_attention import peer_ulysses
from engines.torch_engine.exchange.peer_memory import reachable
from engines.torch_engine.fast_step import Overlap


def module_kernels(overlap: Overlap, device: torch.device, dtype: torch.dtype) -> tuple[MakeKernel, ...]:
    """What ``kernel_by_length`` chooses from, so that all can be checked."""
    return team_kernel, partial(_in_parts, overlap=overlap, device=device, dtype=dtype)


def kernel_by_length(overlap: Overlap, device: torch.device, dtype: torch.dtype) -> MakeKernel:
    """See ``Overlap.parts_from_tokens``. All ranks of a team get the same kind of kernel."""
    short, long = module_kernels(overlap, device, dtype)

    def make(local: Kernel, team: Team, layout: TokenLayout) -> Kernel:
        return (long if layout.num_tokens >= overlap.parts_from_tokens else short)(local, team, layout)

    return make


def _in_parts(
    local: Kernel, team: Team, layout: TokenLayout, *, overlap: Overlap, device: torch.device, dtype: torch.dtype
) -> Kernel:
    splits_heads_alone = team.ulysses.size == team.context.size > 1
    if splits_heads_alone and overlap.peer_memory and reachable(team.ulysses, device, dtype):
        attend = local_attention(device, dtype, layout.valid_rows(0, layout.num_chunks))
        return peer_ulysses(attend, team.ulysses, device)
    return team_kernel(local, team, layout, num_parts=overlap.module_parts)
