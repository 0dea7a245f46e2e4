"""The TensorRT engine for a rank of a gang: configuration resolved, checks made, plans found or built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from engines.model import DenoiserModel
from engines.parallel.mesh import Groups, Team, Teams, gang_widths
from engines.parallel.self_check import self_check
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.builder import BuildOptions
from engines.tensorrt_engine.calibration import quantization
from engines.tensorrt_engine.config import Precision, ResolvedConfig, TensorRTConfig
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.onnx_export import EngineGraph
from engines.tensorrt_engine.plan_cache import PlanCache
from engines.tensorrt_engine.preflight import check_nccl, check_plan, check_same_plan, communicator, current_target
from engines.tensorrt_engine.runtime import PlanRunner
from engines.tensorrt_engine.step import MakeRunner, cached_plan
from engines.tensorrt_engine.targets import Target

Specs = dict[int, tuple[ParallelSpec, ParallelSpec]]


class Place(Protocol):
    """Where a rank finds itself: the gang's ``RankContext``, or a ``RankPlace`` outside a gang."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """A rank of a process group that no gang started."""

    rank: int
    num_ranks: int
    device: str


def load_tensorrt_engine(
    model: DenoiserModel, context: Place, *, strategy: str = "auto", precision: str = "auto"
) -> TensorRTEngine:
    """Made, checked on every team. Every rank of the gang makes this call at the same time.

    Raises ValueError for a configuration TensorRT cannot do, PreflightError, PlanRejectedError, WrongAnswerError.
    """
    config = TensorRTConfig(strategy=strategy, precision=cast(Precision, precision))
    target = current_target(context.rank)
    if context.num_ranks > 1:
        check_nccl(context.rank)
    specs = choose_specs(config, model, context.num_ranks, target)
    teams = form_teams(specs, context)
    make_runner = plan_runners(config, model, context, target)
    as_inputs = config.weights == "inputs"
    engine = TensorRTEngine(
        model,
        teams=teams,
        specs=specs,
        make_runner=make_runner,
        weights_as_inputs=as_inputs,
        native_ring=config.resolve(model, context.num_ranks, target).ring == "native",
        change=lambda name: quantization(model, name, config.precision, config.cache_dir),
    )
    checked = ((team.ranks, team.spec.name) for team in engine.checked_teams())
    self_check(engine, model.probe(), rank=context.rank, teams=checked)
    return engine


def choose_specs(config: TensorRTConfig, model: DenoiserModel, num_ranks: int, target: Target) -> Specs:
    """Divisions per width. ValueError if the whole gang cannot be divided so; narrower widths may be missing."""
    specs: Specs = {}
    for width in gang_widths(num_ranks):
        try:
            paired = config.resolve(model, width, target).spec
            single = paired.without_guidance()
            single.check(num_heads=model.num_heads, has_tensor_plan=bool(model.plan.linears))
        except ValueError:
            if width == num_ranks:
                raise
            continue
        specs[width] = (single, paired)
    return specs


def form_teams(specs: Specs, context: Place) -> Teams:
    every = dict.fromkeys(spec for pair in specs.values() for spec in pair)
    groups = Groups(context.num_ranks)
    return Teams(rank=context.rank, num_ranks=context.num_ranks, specs=every, groups=groups)


def plan_runners(config: TensorRTConfig, model: DenoiserModel, context: Place, target: Target) -> MakeRunner:
    """Runners of plans from the cache, every rank's the same plan, with the team's NCCL communicator."""
    cache = PlanCache(config.cache_dir)
    device = torch.device(context.device)

    def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> PlanRunner:
        resolved = config.resolve(model, len(team.ranks), target)
        plan = cached_plan(graph, _for_team(resolved, team), BuildOptions(target=target), cache)
        check_plan(plan, rank=context.rank, target=target)
        group = team.context.group or team.tensor.group
        if not group:
            return PlanRunner(plan.plan, weights)
        check_same_plan(plan.sha256, rank=context.rank, group=group)
        return PlanRunner(plan.plan, weights, communicator=communicator(group, device))

    return make


def _for_team(resolved: ResolvedConfig, team: Team) -> ResolvedConfig:
    return ResolvedConfig(spec=team.spec, precision=resolved.precision, ring=resolved.ring, target=resolved.target)
