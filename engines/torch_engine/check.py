"""Does the fast path give the module's answer on this machine? Asked once, at start, of every rank alone."""

from __future__ import annotations

import logging

import torch

from engines.core.model import DenoiserModel
from engines.parallel.self_check import TOLERANCE, WrongAnswerError, relative_difference
from engines.torch_engine.engine import TorchEngine

logger = logging.getLogger(__name__)

QUANTISED_TOLERANCE = 0.15
"""Relative error that float8 explains in a small model; a wrong kernel costs far more."""


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
        expected = model.forward(model.modules[branch.module], branch.inputs)
        allowed = QUANTISED_TOLERANCE if engine.config.precision == "fp8" else TOLERANCE.get(expected.dtype, 1e-4)
        for run in range(3):  # as it comes, captured, replayed
            (given,) = engine.predict((branch,), (rank,))
            difference = relative_difference(given, expected)
            if not difference <= allowed:
                raise WrongAnswerError((rank,), f"fast path (branch {number}, run {run})", difference, allowed)
            differences[f"branch {number}, run {run}"] = difference
    logger.info("fast path checked", extra={"rank": rank, "differences": differences})
    return differences
