"""Guidance: branches at the same time, each on a part of a team (classifier-free guidance, arXiv:2207.12598)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.core.model import Branch
from engines.core.shard_plan import ShardPlan
from engines.parallel.communication.collectives import Axis, all_gather


def exchange_predictions(mine: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Every branch's prediction, in branch order, given my part's; mine alone on an axis of size 1."""
    return (mine,) if axis.size == 1 else all_gather(mine, axis).unbind(0)


def may_pair(one: Branch, other: Branch, plan: ShardPlan) -> bool:
    """Whether two branches give predictions of one shape.

    Streams that are cut but never gathered (the text of a joint attention) may differ in length, and what the plan
    calls free in anything; nothing else may.
    """
    return _shapes(one, plan) == _shapes(other, plan)


def _shapes(branch: Branch, plan: ShardPlan) -> dict[str, Any]:
    """The constants, and the shapes of the inputs."""
    gathered = {gather.stream for gather in plan.gathers}
    inner = {shard.key for shard in plan.shards if shard.module == "" and shard.stream not in gathered}
    known = {**branch.constants, **{name: tuple(x.shape) for name, x in branch.inputs.items()}}
    return {name: value for name, value in known.items() if name not in inner and name not in plan.free}
