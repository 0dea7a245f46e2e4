"""Several forwards at a time on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from engines.core.model import Branch
from engines.parallel.communication.mesh import Team
from engines.parallel.guidance import exchange_predictions
from engines.parallel.sharded import ShardedModel


def predict_pipelined(sharded: ShardedModel, work: Iterable[tuple[Branch, Team]]) -> tuple[Tensor, ...]:
    """Predictions of the caller's forwards (with guidance: of all parts of the team').

    All forwards are started before any prediction is passed round, so that a stage computes one while its neighbours
    compute others; with n forwards on s stages, s - 1 of n + s - 1 turns are idle.
    """
    started = [(branch, team, _start(sharded, branch, team)) for branch, team in work]
    predictions: list[Tensor] = []
    for branch, team, mine in started:
        predictions.extend(exchange_predictions(sharded.finish(mine, branch, team), team.guidance))
    return tuple(predictions)


def _start(sharded: ShardedModel, branch: Branch, team: Team) -> Tensor:
    sharded.set_additions(branch, team)
    return sharded.forward(branch, team)
