"""Load a rank's TensorRT engine: resolve the configuration, check the gang, load or build engine files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engines.core.engine import Choosing, RankContext
from engines.core.model import Branch, DenoiserModel
from engines.core.spec import tiling_sizes
from engines.core.tensors import fingerprint
from engines.parallel.division import Division, TeamSpecs
from engines.parallel.early_start import gang_groups
from engines.parallel.mesh import Team
from engines.parallel.self_check import self_check
from engines.tensorrt_engine.build.bindings import Target, load_bindings
from engines.tensorrt_engine.build.builder import BuildOptions, explain_build_errors
from engines.tensorrt_engine.build.caches import EngineCache, cached_engine
from engines.tensorrt_engine.build.export_cache import ExportCache
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.export.buckets import check_branches
from engines.tensorrt_engine.export.exporter import Exporter, change_for
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.rules import TensorRTOptions, check_attention
from engines.tensorrt_engine.run.runtime import (
    EngineRunner,
    LoadedEngine,
    check_engine_file,
    check_nccl,
    check_same_engine_file,
    check_same_facts,
    communicator,
    current_target,
)
from engines.tensorrt_engine.run.step import MakeRunner


def load_tensorrt_engine(
    model: DenoiserModel,
    context: RankContext,
    *,
    strategy: str = "auto",
    precision: str = "auto",
    attention: str = "auto",
    attentions: tuple[str, ...] = (),
    options: TensorRTOptions | None = None,
    expected: Sequence[tuple[Branch, ...]] = (),
    choosing: Choosing | None = None,
) -> TensorRTEngine:
    """Return the engine, self-checked on every team. Collective over the gang.

    ``expected`` are steps in the expected sizes. They share an engine file, which is loaded before this returns, and
    they serve as input of the self-check. ``choosing`` is unused, since fixed rules resolve "auto". Raises ValueError
    for what TensorRT does not support, PreflightError, EngineRejectedError, WrongAnswerError.
    """
    for one in (attention, *attentions):
        check_attention(one)
    config = TensorRTConfig(strategy=strategy, precision=precision, options=options or TensorRTOptions())
    buckets = tuple(branches[0] for branches in expected)
    target = current_target(context.rank)
    groups = gang_groups()  # waits for the early start, which precedes any exchange
    if context.num_ranks > 1:
        nccl = check_nccl(context.rank)
        check_same_facts(start_facts(model, config, target, nccl), rank=context.rank)
    specs = TeamSpecs.of_sizes(tiling_sizes(context.num_ranks), lambda size: config.specs(model, size, target))
    engine = TensorRTEngine(
        model,
        division=Division(specs, model.plan, rank=context.rank, num_ranks=context.num_ranks, groups=groups),
        make_runner=engine_runners(config, model, context, target),
        exporter=exporter_of(config, model, context.num_ranks, target),
        buckets=buckets,
    )
    engine.prepare()
    checked = ((team.ranks, team.spec.name) for team in engine.division.checked_teams())
    branches = check_branches(buckets) if buckets else model.probe()
    self_check(engine, branches, rank=context.rank, teams=checked, at_once=engine.division.at_once)
    return engine


def start_facts(model: DenoiserModel, config: TensorRTConfig, target: Target, nccl: str) -> dict[str, str]:
    """Return by name what must be equal on all ranks of a gang."""
    bindings = load_bindings()
    weights = {f"weights of {name}": fingerprint(module) for name, module in model.modules.items()}
    options = f"strategy {config.strategy}, precision {config.precision}, weights {config.weights}"
    builder = f"{bindings.product} {bindings.version}"
    return {"TensorRT": builder, "GPU": target.name, "NCCL": nccl, "options": options, **weights}


def exporter_of(config: TensorRTConfig, model: DenoiserModel, num_ranks: int, target: Target) -> Exporter:
    return Exporter(
        model=model,
        weights_as_inputs=config.weights == "inputs",
        change=lambda name: change_for(model, name, config.precision, config.cache_dir),
        native_ring=config.resolve(model, num_ranks, target).ring == "native",
        cache=ExportCache(config.cache_dir),
    )


def engine_runners(config: TensorRTConfig, model: DenoiserModel, context: RankContext, target: Target) -> MakeRunner:
    """Return a function that makes runners from cached engine files, with the team's communicator.

    All shapes of an engine file share one deserialized engine, which is loaded again after the last was evicted.
    """
    cache = EngineCache(config.cache_dir)
    device = torch.device(context.device)
    loaded: dict[str, LoadedEngine] = {}

    def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> EngineRunner:
        precision = config.resolve(model, len(team.ranks), target).precision
        options = BuildOptions(target=target)
        with explain_build_errors(model, team.spec.name):
            engine = cached_engine(graph, options, cache, strategy=team.spec.name, precision=precision)
        check_engine_file(engine, rank=context.rank, target=target)
        group = team.context.group or team.tensor.group
        if group:
            check_same_engine_file(engine.sha256, rank=context.rank, group=group)
        if engine.sha256 not in loaded or loaded[engine.sha256].is_released:
            loaded[engine.sha256] = LoadedEngine(engine.engine_file)
        pointer = communicator(group, device) if group else None
        return EngineRunner(loaded[engine.sha256], weights, communicator=pointer)

    return make
