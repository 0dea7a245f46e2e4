"""A graph that is translated as it was traced: the same bytes as traced again by ``torch.onnx``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from engines.tensorrt_engine.export.onnx import graph
from engines.tensorrt_engine.export.onnx.graph import EngineGraph, export_graph


class Odd(nn.Module):
    """What models have: a weight used twice, one under two names, one that is not used, a table, an input given on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned = self.first(x.transpose(0, 1).contiguous()) + self.table * steps
        return torch.addmm(turned, self.second(self.first(turned)), self.first.weight), x, nn.functional.gelu(turned)


def traced() -> fx.GraphModule:
    torch.manual_seed(5)
    with torch.no_grad():
        program = torch.export.export(Odd(), (torch.zeros(4, 4), torch.tensor(3)), strict=False)
        core = program.module(check_guards=False)
    assert isinstance(core, fx.GraphModule)
    return core


def exported(*, as_inputs: bool) -> EngineGraph:
    return export_graph(traced(), ("x", "steps"), ("sum", "same", "mid"), num_ranks=1, weights_as_inputs=as_inputs)


@pytest.mark.parametrize("as_inputs", [True, False])
def test_it_need_not_be_traced_again(monkeypatch: pytest.MonkeyPatch, as_inputs: bool) -> None:
    once = exported(as_inputs=as_inputs)
    monkeypatch.setattr(graph, "program_of", lambda core, examples: core)
    twice = exported(as_inputs=as_inputs)
    assert once.serialized() == twice.serialized()
    assert once.weights == twice.weights
    assert (once.inputs, once.outputs) == (("x", "steps"), ("sum", "same", "mid"))
