"""The PyTorch engine for a rank of a gang."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engines.core.engine import Choosing
from engines.core.host_copy import TouchedMemory
from engines.core.model import Branch, DenoiserModel, with_attention
from engines.core.resources import rank_resources
from engines.parallel.self_check import check_attention, self_check
from engines.torch_engine.autotune import autotuned_engine
from engines.torch_engine.checks import (
    QUANTISED_TOLERANCE,
    check_fast_path,
    check_fp8_attention,
    check_sliced,
    is_exact,
)
from engines.torch_engine.compiler import static_shapes
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import module_kernels
from engines.torch_engine.options import TorchOptions
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE

if TYPE_CHECKING:
    from engines.core.engine import RankContext

logger = logging.getLogger(__name__)


def load_torch_engine(
    model: DenoiserModel,
    context: RankContext,
    *,
    strategy: str = "auto",
    precision: str = "auto",
    attention: str = "auto",
    attentions: tuple[str, ...] = (),
    options: TorchOptions | None = None,
    expected: Sequence[tuple[Branch, ...]] = (),
    choosing: Choosing | None = None,
) -> TorchEngine:
    """Return an engine, made and self-checked. Every rank of the gang makes the call at the same time.

    The ``expected`` steps have no influence here: ``TorchEngine.warm_up`` prepares shapes. Strategy "auto" is decided
    by ``choosing``; without it, by prediction. The ``attentions`` that branches may name are checked as its own is.
    """
    options = options or TorchOptions()
    make = partial(TorchEngine, precision=precision, attention=attention, options=options)
    if options.offloaded_blocks:
        fields = {"rank": context.rank, "offloaded_blocks": options.offloaded_blocks}
        logger.info("steps run eagerly, since blocks are copied from host memory for each", extra=fields)
    if model.device.type == "cuda":
        freeze_garbage_collection()
    if strategy == "auto" and choosing is not None and context.num_ranks > 1:
        engine = autotuned_engine(model, context, choosing, precision=precision, attention=attention, options=options)
    else:
        engine = make(model, strategy=strategy)
    with static_shapes():
        _check(engine, model, context, attentions, make)
    if model.weights is not None:
        engine.load_weights()
    rank_resources().get(TouchedMemory).clear()
    return engine


def _check(
    engine: TorchEngine,
    model: DenoiserModel,
    context: RankContext,
    attentions: tuple[str, ...],
    make: Callable[..., TorchEngine],
) -> None:
    """Check kernels, attention, exchanges and teams on the model's small known step."""
    if model.weights is None:
        check_fp8_attention(engine, model, attentions, rank=context.rank)
    check_fast_path(engine, model, rank=context.rank)
    kernels = module_kernels(engine.config.exchange.peer_memory, engine.device, engine.dtype)
    heads: dict[str, Any] = {"num_heads": model.num_heads, "head_dim": model.head_dim}
    for team in engine.division.teams_in_use():
        for make_kernel in kernels[: 2 if team.ulysses.size > 1 else 1]:
            check_attention(team, **heads, device=engine.device, dtype=engine.dtype, make_kernel=make_kernel)
    if model.weights is not None:
        check_sliced(engine, model, make, attentions, rank=context.rank)
        return
    for one in ("", *attentions):
        _check_teams(engine, with_attention(model.probe(), one), context, one)


def _check_teams(engine: TorchEngine, branches: tuple[Branch, ...], context: RankContext, attention: str) -> None:
    teams = ((team.ranks, team.spec.name) for team in engine.division.checked_teams())
    num_runs = RUNS_BEFORE_CAPTURE + 2 if engine.config.capture else 1  # uncaptured, captured, replayed
    # two nearly equal numbers may be rounded up and down
    tolerance = None if is_exact(engine, attention) else QUANTISED_TOLERANCE
    limits: dict[str, Any] = {"at_once": engine.division.at_once, "num_runs": num_runs, "tolerance": tolerance}
    self_check(engine, branches, rank=context.rank, teams=teams, **limits)


def freeze_garbage_collection() -> None:
    """Exclude current objects from garbage collection: PyTorch collects before every capture (0.15 s without this)."""
    gc.collect()
    gc.freeze()
