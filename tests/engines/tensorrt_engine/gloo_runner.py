"""A stand-in for TensorRT on real ranks: the same graph in onnxruntime, its collectives through torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel.mesh import Groups, Team, Teams
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.collectives import Collective
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.onnx_export import EngineGraph
from engines.tensorrt_engine.preflight import PreflightError, check_same_plan, resolve_group
from engines.tensorrt_engine.simulate import cut_at_collectives
from tests.engines.tensorrt_engine.zoo import SPECIMENS


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
        group = resolve_group(self._group)
        sent = [torch.empty(mine.shape, dtype=torch.from_numpy(mine).dtype) for _ in range(group.size())]
        dist.all_gather(sent, torch.from_numpy(mine), group=group)
        return collective.apply([tensor.numpy() for tensor in sent])[group.rank()]


def predict_on_team(family: str, strategy: str, ranks: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Two steps with other numbers in the same shapes, and the number of engines that were made for them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    spec = ParallelSpec.of(strategy, len(ranks))
    specs = {len(ranks): (spec.without_guidance(), spec)}
    teams = Teams(rank=rank, num_ranks=num_ranks, specs=set(specs[len(ranks)]), groups=Groups(num_ranks))
    model, made = SPECIMENS[family].model(), []

    def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> GlooRunner:
        made.append(GlooRunner(graph, weights, team))
        return made[-1]

    engine = TensorRTEngine(model, teams=teams, specs=specs, make_runner=make, capture=False)
    predictions = []
    for _ in range(2):
        if rank in ranks:
            predictions.extend(engine.predict(model.probe(), ranks))
    engine.close()
    return predictions, len(made)


def same_plan_error(digests: list[str]) -> str:
    assert dist.group.WORLD is not None
    try:
        check_same_plan(digests[dist.get_rank()], rank=dist.get_rank(), group=str(dist.group.WORLD.group_name))
    except PreflightError as error:
        return str(error)
    return ""
