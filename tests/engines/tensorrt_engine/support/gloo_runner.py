"""A stand-in for TensorRT on real ranks: the same graph in onnxruntime, its collectives through torch.distributed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.core.torch_private import process_group
from engines.parallel.division import Division, TeamSpecs
from engines.parallel.mesh import Groups, Team
from engines.tensorrt_engine.build.export_cache import ExportCache
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.export.collectives import Collective
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.run.runtime import PreflightError, check_same_engine_file, check_same_facts
from tests.engines.tensorrt_engine.support.simulate import cut_at_collectives
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, flux_inputs


class GlooRunner:
    def __init__(self, graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> None:
        model = onnx.load_from_string(graph.serialized())
        self._stages = list(cut_at_collectives(model, 1))
        self._weights = {name: tensor.contiguous().numpy() for name, tensor in weights.items()}
        self._outputs = graph.outputs
        self._group = team.context.group or team.tensor.group
        self.num_runs = 0

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.num_runs += 1
        values = self._weights | {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
        for stage in self._stages:
            results = stage.session.run(list(stage.outputs), {name: values[name] for name in stage.inputs})
            values.update(zip(stage.outputs, results, strict=True))
            for collective, source, result in stage.exchanges:
                values[result] = self._exchange(collective, values[source])
        return {name: torch.from_numpy(values[name]) for name in self._outputs}

    def close(self) -> None:
        self._stages.clear()

    def _exchange(self, collective: Collective, mine: np.ndarray) -> np.ndarray:
        group = process_group(self._group)
        sent = [torch.empty(mine.shape, dtype=torch.from_numpy(mine).dtype) for _ in range(group.size())]
        dist.all_gather(sent, torch.from_numpy(mine), group=group)
        return collective.apply([tensor.numpy() for tensor in sent])[group.rank()]


def predict_on_team(folder: Path, family: str, strategy: str, ranks: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Return two steps with other numbers in the same shapes, and the number of engines made for them. Exports are
    stored in ``folder``: one rank makes each for both."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    spec = ParallelSpec.of(strategy, len(ranks))
    model, made = SPECIMENS[family].model(), []
    specs = TeamSpecs(by_size={len(ranks): spec.by_branches()})
    division = Division(specs, model.plan, rank=rank, num_ranks=num_ranks, groups=Groups.of_gang())

    def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> GlooRunner:
        made.append(GlooRunner(graph, weights, team))
        return made[-1]

    exporter = Exporter(model=model, cache=ExportCache(folder))
    engine = TensorRTEngine(model, division=division, make_runner=make, exporter=exporter, capture=False)
    predictions: list[Tensor] = []
    for _ in range(2):
        if rank in ranks:
            predictions.extend(engine.predict(model.probe(), ranks))
    engine.close()
    return predictions, len(made)


SIZES = {"likely": (12, 16, 24), "other": (16, 8, 32), "between": (8, 20, 28), "too large": (16, 16, 24)}
"""Latent height and width and tokens of text; the engine expects the first two sizes."""


def predict_sizes(folder: Path, sizes: tuple[str, ...]) -> tuple[list[Tensor], list[str], int]:
    """Return a prediction in each size, the digests of the graphs with runners, and the number of exports on disk."""
    num_ranks = dist.get_world_size()
    spec = ParallelSpec.of("ulysses", num_ranks)
    model, graphs = SPECIMENS["flux"].model(), []
    specs = TeamSpecs(by_size={num_ranks: (spec, spec)})
    division = Division(specs, model.plan, rank=dist.get_rank(), num_ranks=num_ranks, groups=Groups.of_gang())

    def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> GlooRunner:
        graphs.append(hashlib.sha256(graph.serialized()).hexdigest())
        return GlooRunner(graph, weights, team)

    engine = TensorRTEngine(
        model,
        division=division,
        make_runner=make,
        exporter=Exporter(model=model, cache=ExportCache(folder)),
        buckets=[Branch(inputs=flux_inputs(1, *SIZES[name])) for name in ("likely", "other")],
        capture=False,
    )
    engine.prepare()
    branches = tuple(Branch(inputs=flux_inputs(1, *SIZES[name])) for name in sizes)
    predictions = list(engine.predict(branches, tuple(range(num_ranks))))
    engine.close()
    return predictions, graphs, len(list(folder.rglob("*.zip")))


def alike_error(facts: list[dict[str, str]]) -> str:
    try:
        check_same_facts(facts[dist.get_rank()], rank=dist.get_rank())
    except PreflightError as error:
        return str(error)
    return ""


def same_engine_file_error(digests: list[str]) -> str:
    assert dist.group.WORLD is not None
    try:
        check_same_engine_file(digests[dist.get_rank()], rank=dist.get_rank(), group=str(dist.group.WORLD.group_name))
    except PreflightError as error:
        return str(error)
    return ""
