"""Rules for exchanging heads in a team, and the attention kernels of models that run as their module."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from engines.core.attention import EarlyKernel, Kernel, Prefix
from engines.core.layout import TokenLayout
from engines.core.resources import rank_resources
from engines.parallel.key_rows import current_layout, rows_at_run_time, streams_of
from engines.parallel.mesh import Team
from engines.parallel.strategies import MakeKernel, team_kernel
from engines.torch_engine.exchange.heads import masked_attention_of, whole_masked_attention
from engines.torch_engine.exchange.peer_attention import peer_allgather_kv, peer_ulysses
from engines.torch_engine.exchange.peer_memory import reachable

PARTS_FROM_TOKENS = 16384
"""Steps of at least this many tokens exchange heads in parts, overlapped with attention, and use peer memory
(docs/inside/denoise_step.md)."""

NUM_PARTS = 2
"""Parts that go through NCCL. Ranks with peer memory divide heads as ``peer_attention`` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRules:
    """Choices between several ways to exchange heads."""

    peer_memory: bool = True
    """Ranks write into each other's memory if that works; else they use NCCL alone."""
    side_streams: bool = True
    """Hand-ordered steps over several ranks compute beside their exchanges."""
    parts_from_tokens: int | None = None
    """Other steps of at least this many tokens exchange heads in parts, and gather keys through peer memory; None:
    ``PARTS_FROM_TOKENS``."""

    def __post_init__(self) -> None:
        are_bools = isinstance(self.peer_memory, bool) and isinstance(self.side_streams, bool)
        if not are_bools or type(self.parts_from_tokens) not in (int, type(None)):
            raise ValueError(f"{self} are no rules: two of true or false, and a whole number or null")

    def describe(self) -> str:
        """Return the differences from the default."""
        differences = [] if self.peer_memory else ["without peer memory"]
        differences += [] if self.side_streams else ["without side streams"]
        differences += [] if self.parts_from_tokens is None else [f"in parts from {self.parts_from_tokens} tokens"]
        return ", ".join(differences) or "as usual"


def module_kernels(peer_memory: bool, device: torch.device, dtype: torch.dtype) -> tuple[MakeKernel, ...]:
    """Return the kernels that ``kernel_by_length`` chooses from, so that all can be checked."""
    short = partial(team_kernel, crop=rows_at_run_time)
    return short, partial(_long_step_kernel, peer_memory=peer_memory, device=device, dtype=dtype)


@cache
def kernel_by_length(rules: ExchangeRules, device: torch.device, dtype: torch.dtype) -> MakeKernel:
    """Return kernels by length: long steps exchange heads in parts, through peer memory if that works.

    All ranks of a team get the same kind. Equal rules give the same kernel, which compiled blocks refer to.
    """
    short, long = module_kernels(rules.peer_memory, device, dtype)

    def make(local: Kernel, team: Team, layout: TokenLayout) -> Kernel:
        return (long if goes_in_parts(rules, layout.num_tokens) else short)(local, team, layout)

    return make


def goes_in_parts(rules: ExchangeRules, num_tokens: int) -> bool:
    """Return whether a step of this many tokens exchanges heads in parts."""
    from_tokens = PARTS_FROM_TOKENS if rules.parts_from_tokens is None else rules.parts_from_tokens
    return num_tokens >= from_tokens


def _long_step_kernel(
    local: Kernel, team: Team, layout: TokenLayout, *, peer_memory: bool, device: torch.device, dtype: torch.dtype
) -> Kernel:
    fallback = team_kernel(local, team, layout, num_parts=NUM_PARTS, crop=rows_at_run_time)
    if not (peer_memory and meets_peers(team) and reachable(team.context, device, dtype)):
        return fallback
    return where_even(_peer_kernel(local, team, streams_of(layout), device), fallback, team.ulysses.size)


class PeerKernels(dict[Hashable, Kernel]):
    """Kernels of a rank, which serve all layouts of the same streams: compiled code refers to their operations."""


def _peer_kernel(local: Kernel, team: Team, streams: str, device: torch.device) -> Kernel:
    """Return attention through peer memory over the current forward's layout of these streams."""
    kernels, key = rank_resources().get(PeerKernels), (local, team.ulysses, team.allgather_kv, streams)
    layout = partial(current_layout, streams)
    if key in kernels:
        return kernels[key]
    if team.ulysses.size > 1:
        kernel = peer_ulysses(whole_masked_attention(local, layout), team.ulysses, device)
    else:
        kernel = peer_allgather_kv(masked_attention_of(local), team.allgather_kv, layout, device)
    return kernels.setdefault(key, kernel)


def meets_peers(team: Team) -> bool:
    """Return whether a rank's attention meets its whole team at once: by Ulysses or AllGather-KV alone."""
    return team.context.size > 1 and team.context.size in (team.ulysses.size, team.allgather_kv.size)


def where_even(even: Kernel, other: Kernel, num_ranks: int) -> Kernel:
    """Return ``even`` if query and key heads divide evenly and there is no prefix, else ``other``.

    An ``EarlyKernel`` sends keys as ``even`` does: it takes any heads.
    """

    def chosen(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        is_even = q_BLHD.shape[2] % num_ranks == 0 == k_BLGD.shape[2] % num_ranks
        if prefix is None and is_even:
            return even(q_BLHD, k_BLGD, v_BLGD, mask_BM=mask_BM)
        return other(q_BLHD, k_BLGD, v_BLGD, mask_BM=mask_BM, prefix=prefix)

    return EarlyKernel(attend=chosen, send=even.send) if isinstance(even, EarlyKernel) else chosen
