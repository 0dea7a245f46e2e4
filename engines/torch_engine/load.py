"""The PyTorch engine for a rank of a gang."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.model import DenoiserModel
from engines.parallel.self_check import check_attention, self_check
from engines.torch_engine.checks import QUANTISED_TOLERANCE, check_fast_path, check_sliced
from engines.torch_engine.config import TorchEngineConfig
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import module_kernels
from engines.torch_engine.fast_step import DEFAULT_OVERLAP
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE

if TYPE_CHECKING:
    from engines.core.rank import RankContext


def load_torch_engine(
    model: DenoiserModel,
    context: RankContext,
    *,
    strategy: str = "auto",
    precision: str = "auto",
    peer_memory: bool = True,
    calibration: Path | None = None,
) -> TorchEngine:
    """Made and self-checked. Every rank of the gang makes this call at the same time.

    ``peer_memory``: see ``Overlap``; without it the ranks exchange through NCCL alone. ``calibration``: the file of
    scales that ``precision`` "fp8-static" takes.
    """
    overlap = replace(DEFAULT_OVERLAP, peer_memory=peer_memory)
    config = TorchEngineConfig(strategy=strategy, precision=precision, calibration=calibration, overlap=overlap)
    engine = TorchEngine(model, config=config)
    if engine.config.capture:
        keep_for_good()
    check_fast_path(engine, model, rank=context.rank)
    attention: dict[str, Any] = {"num_heads": model.num_heads, "head_dim": model.head_dim}
    for team in engine.division.teams.all():
        for make_kernel in module_kernels(overlap, engine.device, engine.dtype)[: 2 if team.ulysses.size > 1 else 1]:
            check_attention(team, **attention, device=engine.device, dtype=engine.dtype, make_kernel=make_kernel)
    if model.weights is not None:
        check_sliced(
            engine,
            model,
            lambda small, strategy: TorchEngine(small, config=replace(config, strategy=strategy)),
            rank=context.rank,
        )
        engine.load_weights()
        return engine
    teams = ((team.ranks, team.spec.name) for team in engine.division.checked_teams())
    num_runs = RUNS_BEFORE_CAPTURE + 2 if engine.config.capture else 1  # as it comes, captured, replayed
    tolerance = None if config.is_native else QUANTISED_TOLERANCE  # of two nearly equal numbers one may be rounded up
    self_check(engine, model.probe(), rank=context.rank, teams=teams, num_runs=num_runs, tolerance=tolerance)
    return engine


def keep_for_good() -> None:
    """Spare garbage collection what is there now: PyTorch collects before every capture, 0.15 s if it looks at all."""
    gc.collect()
    gc.freeze()
