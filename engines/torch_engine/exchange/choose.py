"""How the ranks of a team exchange heads: the rules, and attention by them in models that run as their module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.layout import TokenLayout
from engines.parallel.mesh import Team
from engines.parallel.strategies import MakeKernel, team_kernel
from engines.torch_engine.exchange.heads import local_attention
from engines.torch_engine.exchange.peer_attention import peer_allgather_kv, peer_ulysses
from engines.torch_engine.exchange.peer_memory import reachable

PARTS_FROM_TOKENS = 16384
"""Steps of so many tokens exchange heads in parts, some beside the attention of others, and use the memory that ranks
share (docs/inside/denoise_step.md)."""

NUM_PARTS = 2
"""So many parts go through NCCL; ranks that write into each other's memory divide them as ``peer_attention`` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRules:
    """How ranks exchange heads, where there is more than one way."""

    peer_memory: bool = True
    """Ranks write into each other's memory where that works; else they call NCCL alone."""
    side_streams: bool = True
    """Hand-ordered steps over several ranks compute beside their exchanges."""
    parts_from_tokens: int | None = None
    """Other steps of at least so many tokens exchange heads in parts; None: of ``PARTS_FROM_TOKENS``."""

    def __post_init__(self) -> None:
        are_bools = isinstance(self.peer_memory, bool) and isinstance(self.side_streams, bool)
        if not are_bools or type(self.parts_from_tokens) not in (int, type(None)):
            raise ValueError(f"{self} are no rules: two of true or false, and a whole number or null")

    def describe(self) -> str:
        """Return what is not usual."""
        unusual = [] if self.peer_memory else ["without peer memory"]
        unusual += [] if self.side_streams else ["without side streams"]
        unusual += [] if self.parts_from_tokens is None else [f"in parts from {self.parts_from_tokens} tokens"]
        return ", ".join(unusual) or "as usual"


def module_kernels(peer_memory: bool, device: torch.device, dtype: torch.dtype) -> tuple[MakeKernel, ...]:
    """What ``kernel_by_length`` chooses from, so that all can be checked."""
    return team_kernel, partial(_of_long_steps, peer_memory=peer_memory, device=device, dtype=dtype)


@cache
def kernel_by_length(rules: ExchangeRules, device: torch.device, dtype: torch.dtype) -> MakeKernel:
    """Long steps exchange heads in parts, and through each other's memory where that works. All ranks of a team get the
    same kind of kernel, and the same one whenever the rules are the same: compiled blocks know it.
    """
    short, long = module_kernels(rules.peer_memory, device, dtype)

    def make(local: Kernel, team: Team, layout: TokenLayout) -> Kernel:
        return (long if goes_in_parts(rules, layout.num_tokens) else short)(local, team, layout)

    return make


def goes_in_parts(rules: ExchangeRules, num_tokens: int) -> bool:
    """Whether a step of so many tokens exchanges heads in parts."""
    from_tokens = PARTS_FROM_TOKENS if rules.parts_from_tokens is None else rules.parts_from_tokens
    return num_tokens >= from_tokens


def _of_long_steps(
    local: Kernel, team: Team, layout: TokenLayout, *, peer_memory: bool, device: torch.device, dtype: torch.dtype
) -> Kernel:
    usual = team_kernel(local, team, layout, num_parts=NUM_PARTS)
    if not (peer_memory and meets_peers(team) and reachable(team.context, device, dtype)):
        return usual
    if team.ulysses.size > 1:
        attend = local_attention(device, dtype, layout.valid_rows(0, layout.num_chunks))
        peers = peer_ulysses(attend, team.ulysses, device)
        return where_even(peers, usual, team.ulysses.size)
    return where_even(peer_allgather_kv(local_attention(device, dtype), team.allgather_kv, layout, device), usual, 1)


def meets_peers(team: Team) -> bool:
    """Whether a rank's attention meets all others of its team at once: by Ulysses or AllGather-KV, and nothing else."""
    return team.context.size > 1 and team.context.size in (team.ulysses.size, team.allgather_kv.size)


def where_even(even: Kernel, other: Kernel, num_ranks: int) -> Kernel:
    """``even`` for calls without mask and prefix whose heads, of queries and of keys, are a multiple of the ranks;
    ``other`` for all others. Ranks decide alike.
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
        if mask_BM is None and prefix is None and is_even:
            return even(q_BLHD, k_BLGD, v_BLGD)
        return other(q_BLHD, k_BLGD, v_BLGD, mask_BM=mask_BM, prefix=prefix)

    return chosen
