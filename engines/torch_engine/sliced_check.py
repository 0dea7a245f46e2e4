"""The self-check of a gang none of whose ranks could run the model alone: with as many blocks as one rank can hold."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.parallel.copies import truncated
from engines.parallel.mesh import team_of_one
from engines.parallel.self_check import TOLERANCE, WrongAnswerError, relative_difference
from engines.parallel.sharded import ShardedModel
from engines.torch_engine.check import QUANTISED_TOLERANCE
from engines.torch_engine.config import TorchEngineConfig
from engines.torch_engine.engine import TorchEngine

logger = logging.getLogger(__name__)


@torch.no_grad()
def check_sliced(engine: TorchEngine, model: DenoiserModel, config: TorchEngineConfig, *, rank: int) -> float:
    """Compare the gang with one rank on ``model`` cut down to a block of each kind a stage, read from the same files.

    The team, the strategy, the exchanges and the way that weights are read are those of the whole model. Returns the
    relative difference; raises ``WrongAnswerError``. All ranks make the call.
    """
    ranks = tuple(range(engine.team_sizes[-1]))
    num_blocks = engine.team(ranks).pipeline.size
    small = truncated(model, num_blocks)
    branches = small.probe()
    expected = _alone(small, branches)
    allowed = TOLERANCE.get(expected[0].dtype, 1e-4) if config.is_native else QUANTISED_TOLERANCE
    worst = 0.0
    for number in sorted({1, len(branches)}):
        spec = engine.team(ranks, number).spec
        with closing(TorchEngine(small, config=replace(config, strategy=spec.name))) as together:
            given = together.predict(branches[:number], ranks)
        worst = max(worst, *map(relative_difference, given, expected))  # expected may be longer: map stops
        if not worst <= allowed:
            raise WrongAnswerError(ranks, spec.name, worst, allowed)
    logger.info("self-check passed on %d blocks of each kind", num_blocks, extra={"rank": rank, "difference": worst})
    return worst


def _alone(model: DenoiserModel, branches: tuple[Branch, ...]) -> tuple[Tensor, ...]:
    sharded = ShardedModel(model)
    answers = tuple(sharded.forward(branch, team_of_one()) for branch in branches)
    sharded.close()
    return answers
