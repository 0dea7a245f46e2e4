"""What the ranks of a gang could do otherwise when they exchange heads, in a step that is known.

All ranks make the same calls and get the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engines.parallel.communication.mesh import Team
from engines.planner.exchange_rules import ExchangeRules
from engines.torch_engine.agreement import is_anywhere
from engines.torch_engine.exchange.choose import goes_in_parts, meets_peers
from engines.torch_engine.exchange.peer_memory import reachable


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedForward:
    """One of a rank's in the step: over which team, and how many tokens. ``is_fast``: hand-ordered. ``is_even``: the
    ranks that exchange heads get as many each."""

    team: Team
    num_tokens: int
    is_fast: bool
    is_even: bool

    @property
    def splits_heads(self) -> bool:
        return self.team.ulysses.size > 1


Alternative = Callable[[ExchangeRules], ExchangeRules | None]
"""The rules with one of them changed; None where that would change nothing."""


def alternatives(
    forwards: tuple[DividedForward, ...], device: torch.device, dtype: torch.dtype, *, peer_memory: bool
) -> tuple[Alternative, ...]:
    """What may be changed, in the order in which it is tried. Nothing on a CPU, where nothing goes on beside anything.

    ``peer_memory``: whether that is left to choose.
    """
    if not runs_beside(device):
        return ()

    def otherwise_in_parts(rules: ExchangeRules) -> ExchangeRules | None:
        lengths = [each.num_tokens for each in forwards if each.splits_heads and not each.is_fast]
        if not lengths:
            return None
        # What a long step loses a shorter one does not gain, and the other way round.
        in_parts = any(goes_in_parts(rules, length) for length in lengths)
        return replace(rules, parts_from_tokens=max(lengths) + 1 if in_parts else min(lengths))

    def otherwise_through_memory(rules: ExchangeRules) -> ExchangeRules | None:
        if not peer_memory:
            return None
        # Teams of one gang may lie on several hosts.
        reached = [_reaches_peers(each, rules, device, dtype) for each in forwards]
        return replace(rules, peer_memory=not rules.peer_memory) if is_anywhere(any(reached), device) else None

    def otherwise_beside(rules: ExchangeRules) -> ExchangeRules | None:
        changes = any(each.is_fast and each.team.context.size > 1 for each in forwards)
        return replace(rules, side_streams=not rules.side_streams) if changes else None

    return otherwise_in_parts, otherwise_through_memory, otherwise_beside


def runs_beside(device: torch.device) -> bool:
    """Whether exchanges and other work go on at the same time there."""
    return device.type == "cuda"


def _reaches_peers(forward: DividedForward, rules: ExchangeRules, device: torch.device, dtype: torch.dtype) -> bool:
    """As ``fast_step`` and ``choose`` have it."""
    team = forward.team
    if forward.is_fast:
        has_way = team.ulysses.size == team.context.size
    else:
        has_way = forward.is_even and goes_in_parts(rules, forward.num_tokens)
    return has_way and meets_peers(team) and reachable(team.context, device, dtype)
