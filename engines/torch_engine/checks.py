"""Self-checks of a starting gang for this engine: the fast path, and weights that are read in slices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel, with_attention
from engines.core.tensors import relative_difference
from engines.fast.kernels import QuantRows, quantize_weight
from engines.parallel.copies import truncated
from engines.parallel.mesh import team_of_one
from engines.parallel.self_check import SKIPPED, TOLERANCE, WrongAnswerError, repeat_to
from engines.parallel.sharded import ShardedModel
from engines.quantization.linear import FP8
from engines.torch_engine.engine import TorchEngine

logger = logging.getLogger(__name__)

QUANTISED_TOLERANCE = 0.15
"""Relative error that float8 explains in a small model. A wrong kernel costs far more."""
MAX_ATTENTION_ERROR = 0.1
"""Largest relative error of a step whose attention is in float8 (docs/scale/strategies.md)."""

WEIGHT_TOLERANCE = 0.05
"""Relative error of float8 values, which have three bits after the first one."""


def is_exact(engine: TorchEngine, attention: str = "") -> bool:
    """Return whether a step with this ``attention`` (empty: the engine's) has no products of quantised numbers."""
    return engine.config.precision == "native" and (attention or engine.config.attention) == "auto"


def tolerance_of(engine: TorchEngine, dtype: torch.dtype, attention: str = "") -> float:
    """Return the relative error that rounding explains. Two nearly equal numbers may be quantised up and down."""
    return TOLERANCE.get(dtype, 1e-4) if is_exact(engine, attention) else QUANTISED_TOLERANCE


def check_fp8_attention(
    engine: TorchEngine, model: DenoiserModel, attentions: tuple[str, ...] = (), *, rank: int
) -> dict[str, float]:
    """Compare a step of one rank with the same one without float8 in its attention, on the model's probe.

    ``attentions`` are those that branches may name beside the engine's own. Return the difference per branch (none if
    attention is always in the model's dtype). Raise ``ValueError`` above ``MAX_ATTENTION_ERROR``. Weights that are read
    in slices are checked by ``check_sliced``.
    """
    own, branches = engine.config.attention, model.probe()
    attention = next((one for one in (own, *attentions) if one != "auto"), None)
    if attention is None:
        return {}
    in_float8, exact = ("" if one == own else one for one in (attention, "auto"))
    actual = engine.predict(with_attention(branches, in_float8), (rank,)) if branches else ()
    expected = engine.predict(with_attention(branches, exact), (rank,)) if branches else ()
    differences = {
        f"branch {number}": relative_difference(*pair) for number, pair in enumerate(zip(actual, expected, strict=True))
    }
    worst = max(differences.values(), default=0.0)
    if not worst <= MAX_ATTENTION_ERROR:
        raise ValueError(
            f"attention: {attention} changes a step of this model by {worst:.2g} (relative; {MAX_ATTENTION_ERROR} is "
            "allowed): leave attention out, which is auto"
        )
    logger.info("attention in float8 checked", extra={"rank": rank, "differences": differences})
    return differences


@torch.no_grad()
def check_fast_path(engine: TorchEngine, model: DenoiserModel, *, rank: int) -> dict[str, float]:
    """Compare the fast step on one rank, uncaptured and replayed, with the plain module, on the model's probe.

    The self-check compares teams with one rank, both on the fast path, so it misses a kernel that is wrong on both.
    Quantised weights are compared on a matrix, since the module has the same ones. Return the difference per branch
    (none without a fast path); raise ``WrongAnswerError``.
    """
    if not engine.config.fast:
        return {}
    differences: dict[str, float] = {}
    if engine.config.precision != "native":
        differences["weights"] = _check_quantised_weights(engine, rank=rank)
    for number, branch in enumerate(model.probe()):
        expected = model.forward(model.modules[branch.module], branch.arguments)
        allowed = tolerance_of(engine, expected.dtype)
        for run in range(3):  # uncaptured, captured, replayed
            (actual,) = engine.predict((branch,), (rank,))
            difference = relative_difference(actual, expected)
            if not difference <= allowed:
                raise WrongAnswerError((rank,), f"fast path (branch {number}, run {run})", difference, allowed)
            differences[f"branch {number}, run {run}"] = difference
    logger.info("fast path checked", extra={"rank": rank, "differences": differences})
    return differences


def _check_quantised_weights(engine: TorchEngine, *, rank: int) -> float:
    """Compare a matrix as a hand-ordered step quantises it with the matrix."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(64, 256, generator=generator).to(engine.device, engine.dtype)
    rows = QuantRows(
        values_RC=torch.empty_like(weight_NK, dtype=FP8),
        scale_R1=torch.empty(64, 1, dtype=torch.float32, device=engine.device),
    )
    quantize_weight(weight_NK, engine.dtype, rows)
    difference = relative_difference(rows.dequantized(), weight_NK.float())
    if not difference <= WEIGHT_TOLERANCE:
        raise WrongAnswerError((rank,), "quantised weights", difference, WEIGHT_TOLERANCE)
    return difference


@torch.no_grad()
def check_sliced(
    engine: TorchEngine,
    model: DenoiserModel,
    make: Callable[..., TorchEngine],
    attentions: tuple[str, ...] = (),
    *,
    rank: int,
) -> float:
    """Compare the gang with one rank on a truncated model, where no rank can run the whole model alone.

    ``make`` returns an engine of a model for a ``strategy``. It gets ``model`` truncated to a block of each kind per
    stage, read from the same files. Team, strategy, exchanges and reading of weights are those of the whole model.
    ``attentions`` are those that branches may name. All ranks make the call. Return the relative difference, 0 without
    a known step; raise ``WrongAnswerError``.
    """
    probe = model.probe()
    if not probe:
        logger.warning(SKIPPED, extra={"rank": rank})
        return 0.0
    ranks = tuple(range(engine.team_sizes[-1]))
    num_blocks = engine.division.team(ranks).pipeline.size
    small = truncated(model, num_blocks)
    max_branches = max(len(probe), engine.division.at_once)
    branches = repeat_to(probe, max_branches)
    expected = _predict_alone(small, branches)
    worst = 0.0
    for number in range(1, max_branches + 1):
        spec = engine.division.team(ranks, number).spec
        with closing(make(small, strategy=spec.name)) as together:
            for attention in ("", *attentions):
                allowed = tolerance_of(engine, expected[0].dtype, attention)
                actual = together.predict(with_attention(branches[:number], attention), ranks)
                difference = max(map(relative_difference, actual, expected))  # map stops at the shorter
                if not difference <= allowed:
                    raise WrongAnswerError(ranks, spec.name, difference, allowed)
                worst = max(worst, difference)
    logger.info("self-check passed on %d blocks of each kind", num_blocks, extra={"rank": rank, "difference": worst})
    return worst


def _predict_alone(model: DenoiserModel, branches: tuple[Branch, ...]) -> tuple[Tensor, ...]:
    sharded = ShardedModel(model)
    predictions = tuple(sharded.forward(branch, team_of_one()) for branch in branches)
    sharded.close()
    return predictions
