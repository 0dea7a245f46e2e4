"""What a gang checks at its start, beside what all engines do: the fast path, and weights that are read in slices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.tensors import relative_difference
from engines.parallel.copies import truncated
from engines.parallel.mesh import team_of_one
from engines.parallel.self_check import SKIPPED, TOLERANCE, WrongAnswerError, repeat_to
from engines.parallel.sharded import ShardedModel
from engines.torch_engine.engine import TorchEngine

logger = logging.getLogger(__name__)

QUANTISED_TOLERANCE = 0.15
"""Relative error that float8 explains in a small model; a wrong kernel costs far more."""


def tolerance_of(engine: TorchEngine, dtype: torch.dtype) -> float:
    """The relative error that rounding explains. Of two nearly equal numbers one may be quantised up, one down."""
    return TOLERANCE.get(dtype, 1e-4) if engine.config.precision == "native" else QUANTISED_TOLERANCE


@torch.no_grad()
def check_fast_path(engine: TorchEngine, model: DenoiserModel, *, rank: int) -> dict[str, float]:
    """Compare the fast step on one rank, uncaptured and replayed, with the module run plainly, on the model's probe.

    The self-check compares teams with one rank, both on the fast path: a kernel that is wrong on both would pass it.
    Returns the difference per branch (none without a fast path); raises ``WrongAnswerError``.
    """
    if not engine.config.fast:
        return {}
    differences: dict[str, float] = {}
    for number, branch in enumerate(model.probe()):
        expected = model.forward(model.modules[branch.module], branch.arguments)
        allowed = tolerance_of(engine, expected.dtype)
        for run in range(3):  # as it comes, captured, replayed
            (given,) = engine.predict((branch,), (rank,))
            difference = relative_difference(given, expected)
            if not difference <= allowed:
                raise WrongAnswerError((rank,), f"fast path (branch {number}, run {run})", difference, allowed)
            differences[f"branch {number}, run {run}"] = difference
    logger.info("fast path checked", extra={"rank": rank, "differences": differences})
    return differences


@torch.no_grad()
def check_sliced(engine: TorchEngine, model: DenoiserModel, make: Callable[..., TorchEngine], *, rank: int) -> float:
    """Compare a gang none of whose ranks could run the model alone with one rank, on as many blocks as that can hold.

    ``make`` makes an engine of a model for a ``strategy``: it gets ``model`` cut down to a block of each kind a stage,
    read from the same files. The team, the strategy, the exchanges and the way that weights are read are those of the
    whole model. Returns the relative difference, 0 if no step is known; raises ``WrongAnswerError``. All ranks make the
    call.
    """
    probe = model.probe()
    if not probe:
        logger.warning(SKIPPED, extra={"rank": rank})
        return 0.0
    ranks = tuple(range(engine.team_sizes[-1]))
    num_blocks = engine.division.team(ranks).pipeline.size
    small = truncated(model, num_blocks)
    most = max(len(probe), engine.division.at_once)
    branches = repeat_to(probe, most)
    expected = _alone(small, branches)
    allowed = tolerance_of(engine, expected[0].dtype)
    worst = 0.0
    for number in range(1, most + 1):
        spec = engine.division.team(ranks, number).spec
        with closing(make(small, strategy=spec.name)) as together:
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
