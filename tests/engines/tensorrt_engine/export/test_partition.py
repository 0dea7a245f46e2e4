"""Some forwards run in torch but not in TensorRT unchanged: the core leaves parts to torch, and drops others."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from engines.tensorrt_engine.export.graph import EngineGraph, export_core
from engines.tensorrt_engine.export.partition import Parts, partition
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.simulate import Simulator

WIDTH = 4


class Squeezed(nn.Module):
    """Squeezes dims that are not 1, which torch leaves unchanged, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x_11C: Tensor = self.module(inputs["x"])
        return x_11C.squeeze(2).squeeze(0).squeeze((0, 1)) * x_11C.squeeze(-1)


class Summed(nn.Module):
    """Adds a linear's output at places that are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        places_NC = inputs["places"][:, None].expand(-1, WIDTH)
        x_LC: Tensor = self.module(inputs["x"])
        return self.last(x_LC.scatter_add(0, places_NC, inputs["time"]))  # type: ignore[no-any-return]


def parts_of(module: nn.Module, inputs: dict[str, Tensor]) -> Parts:
    with torch.no_grad():
        traced = torch.export.export(module.eval(), (inputs,), strict=False).module(check_guards=False)
    assert isinstance(traced, fx.GraphModule)
    return partition(traced)


@torch.no_grad()
def predicted(parts: Parts, graph: EngineGraph, inputs: dict[str, Tensor]) -> Tensor:
    made = dict(zip(parts.prologue_outputs, parts.prologue(**inputs, rank_index=0), strict=True))
    weights = {name: tensor.detach() for name, tensor in parts.core.named_parameters()}
    feeds = {name: made[name] for name in graph.inputs} | {name: weights[f"module.{name}"] for name in graph.weights}
    (result,) = Simulator(graph.serialized()).run([{name: x.contiguous().numpy() for name, x in feeds.items()}])
    return torch.from_numpy(result[0])


def test_a_squeeze_of_a_dim_that_stays_is_dropped(build_file: Build) -> None:
    module, inputs = Squeezed(), {"x": torch.randn(1, 1, WIDTH)}
    parts = parts_of(module, inputs)
    graph = export_core(parts, 1, weights_as_inputs=False)
    build_file(graph.serialized())
    torch.testing.assert_close(predicted(parts, graph, inputs), module(inputs))


def test_sums_at_named_places_are_made_in_torch(build_file: Build) -> None:
    """The linear whose output they add is torch's as well; the one behind them is the engine's."""
    module = Summed()
    inputs = {"x": torch.randn(5, WIDTH), "time": torch.randn(3, WIDTH), "places": torch.tensor([1, 3, 3])}
    parts = parts_of(module, inputs)
    graph = export_core(parts, 1, weights_as_inputs=False)
    build_file(graph.serialized())
    assert [node.op_type for node in graph.model.graph] == ["Gemm"]
    torch.testing.assert_close(predicted(parts, graph, inputs), module(inputs))
