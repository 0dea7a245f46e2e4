"""SGLang's graphs: its runner and its padding of prompts are called like its denoising stage calls them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.peers import sglang_graphs
from benchmarks.peers.sglang_graphs import GraphedTransformer, weak_reference

RUNTIME = "sglang.multimodal_gen.runtime"


class Runner:
    """The relevant part of its runner: an error of ``capture`` would lead to an eager step."""

    def __init__(self, transformer: Any, device: torch.device) -> None:
        self.transformer, self.device, self.entries = transformer, device, dict[Any, Any]()

    def __call__(self, **arguments: Any) -> Any:
        key = self._signature(arguments)
        if key not in self.entries and not (self._should_capture_on_call(key) and self.capture(**arguments)):
            return self.transformer(**arguments)
        return self.entries[key], arguments

    def _signature(self, arguments: Mapping[str, Any]) -> Any:
        return tuple(arguments.items())

    def _should_capture_on_call(self, key: Any) -> bool:
        return False

    def capture(self, **arguments: Any) -> bool:
        return False

    def _capture(self, arguments: Mapping[str, Any], key: Any) -> str:
        if self.transformer.synchronizes:
            raise RuntimeError("operation not permitted when stream is capturing")
        return "graph"


@pytest.fixture
def padders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the registered padders of models; the first is chosen."""
    registered: list[Any] = []
    padding: Any = ModuleType("prompt_padding")
    padding.select_prompt_padder = lambda transformer, arguments: registered[0] if registered else None
    padding.pad_masked_prompt_kwargs = lambda arguments, buckets: {**arguments, "filled": buckets}
    package = f"{RUNTIME}.breakable_cuda_graph"
    modules = {
        package: SimpleNamespace(prompt_padding=padding),
        f"{package}.runner": SimpleNamespace(DiffusionBreakableCudaGraphRunner=Runner),
        f"{RUNTIME}.server_args": SimpleNamespace(DEFAULT_BCG_TEXT_BUCKETS=(64, 512)),
    }
    parents = {".".join(name.split(".")[:end]) for name in modules for end in range(1, len(name.split(".")))}
    for name in sorted(parents - modules.keys()):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    return registered


def transformer_that(synchronizes: bool = False) -> Any:
    parameter = torch.zeros(1)
    return SimpleNamespace(parameters=lambda: iter([parameter]), synchronizes=synchronizes, cached_kv={})


def test_the_first_call_captures_and_the_prompt_is_filled(padders: list[Any]) -> None:
    graphed = GraphedTransformer(transformer_that())
    assert graphed(text=1) == ("graph", {"text": 1, "filled": (64, 512)})
    padders.append(lambda arguments, transformer, buckets: {"text": arguments["text"] + buckets[0]})
    assert graphed(text=1) == ("graph", {"text": 65})


@pytest.mark.usefixtures("padders")
def test_what_cannot_be_captured_is_an_error_and_not_an_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(sglang_graphs, "forget_capture", forgotten.append)
    with pytest.raises(RuntimeError, match="cannot capture its graphs: RuntimeError: operation not permitted"):
        GraphedTransformer(transformer_that(synchronizes=True))(text=1)
    assert forgotten == ["stream"]


@pytest.mark.usefixtures("padders")
def test_it_stands_in_for_its_transformer() -> None:
    transformer = transformer_that()
    GraphedTransformer(transformer).cached_kv["branch"] = 1
    assert transformer.cached_kv == {"branch": 1}


@pytest.mark.gpu
def test_a_weak_reference_is_the_same_memory() -> None:
    x = torch.arange(24, device="cuda", dtype=torch.bfloat16).view(4, 6).t()[1:]
    view = weak_reference(x)
    assert (view.shape, view.stride(), view.data_ptr()) == (x.shape, x.stride(), x.data_ptr())
    view.zero_()
    assert not x.any()
