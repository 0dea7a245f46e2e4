"""Pipeline: consecutive blocks on consecutive ranks, with several jobs in flight (Huang et al. 2018, arXiv:1811.06965).

Every stage runs the whole module's ``forward`` but skips the blocks of other stages. Embedders and the last projection
are cheap and run everywhere. Stages send the tensors that blocks carry to the next stage.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.shard_plan import ShardPlan
from engines.parallel.collectives import broadcast, receive, start_send, wait
from engines.parallel.mesh import Team


class Stage:
    """Makes ``module`` (a copy for this purpose) compute one rank's share of the blocks only.

    ``weights`` are those of all blocks (``block_weights``) before any layer is swapped.
    """

    def __init__(self, module: nn.Module, plan: ShardPlan, team: Team, weights: Sequence[int]) -> None:
        self._plan, self._team = plan, team
        self._pending_sends: list[tuple[Tensor, Tensor]] = []
        blocks = pipeline_blocks(module, plan)
        first, last = _rank_bounds(weights, team)
        for block in other_stages(module, plan, team, weights):
            block.__dict__["forward"] = _identity_forward(block, plan.carried)
        if team.before is not None:
            blocks[first].register_forward_pre_hook(self._receive, with_kwargs=True)
        if team.after is not None:
            blocks[last - 1].register_forward_hook(self._send)

    def finish(self, prediction: Tensor) -> Tensor:
        """Return the last stage's prediction on every stage. Call it after all overlapping forwards were started."""
        for pending, _message in self._pending_sends:
            wait(pending)
        self._pending_sends.clear()
        return broadcast(prediction, self._team.pipeline, source=self._team.pipeline.size - 1)

    def _receive(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
        carried: list[Tensor] = [bound.arguments[name] for name in self._plan.carried]
        assert self._team.before is not None
        message = receive(sum(x.numel() for x in carried), carried[0], self._team.before)
        pieces = torch.split(message, [x.numel() for x in carried])
        for name, piece, x in zip(self._plan.carried, pieces, carried, strict=True):
            bound.arguments[name] = piece.view(x.shape)
        return bound.args[1:], bound.kwargs

    def _send(self, _block: nn.Module, _args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        assert self._team.after is not None
        carried = (output,) if isinstance(output, Tensor) else output
        message = torch.cat([x.flatten() for x in carried])
        self._pending_sends.append((start_send(message, self._team.after), message))


def pipeline_blocks(module: nn.Module, plan: ShardPlan) -> list[nn.Module]:
    """Return the blocks that a pipeline may be cut between, in running order; none if the plan carries nothing."""
    if not plan.carried:
        return []
    return plan.blocks_of(module)


def block_weights(module: nn.Module, plan: ShardPlan) -> list[int]:
    """Return each block's number of parameters, by which stages are cut. Quantised layers count as 0."""
    return [sum(weight.numel() for weight in block.parameters()) for block in pipeline_blocks(module, plan)]


def other_stages(module: nn.Module, plan: ShardPlan, team: Team, weights: Sequence[int]) -> list[nn.Module]:
    """Return the blocks that other stages run."""
    if team.pipeline.size == 1:
        return []
    blocks = pipeline_blocks(module, plan)
    first, last = _rank_bounds(weights, team)
    return [*blocks[:first], *blocks[last:]]


def _rank_bounds(weights: Sequence[int], team: Team) -> tuple[int, int]:
    return stage_bounds(weights, team.pipeline.size)[team.pipeline.index]


def stage_bounds(weights: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """Return half-open ranges of blocks per stage, at least one block each, of about equal weight."""
    assert len(weights) >= num_stages, (len(weights), num_stages)
    sums = [0, *itertools.accumulate(weights)]
    ends = [0]
    for stage in range(1, num_stages):
        target = sums[-1] * stage / num_stages
        allowed = range(ends[-1] + 1, len(weights) - (num_stages - stage) + 1)
        ends.append(min(allowed, key=lambda end: abs(sums[end] - target)))
    return list(itertools.pairwise([*ends, len(weights)]))


def _identity_forward(block: nn.Module, carried: tuple[str, ...]) -> Any:
    """Return a ``forward`` that returns its inputs unchanged."""
    signature = inspect.signature(type(block).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(block, *args, **kwargs).arguments
        return arguments[carried[0]] if len(carried) == 1 else tuple(arguments[name] for name in carried)

    return forward
