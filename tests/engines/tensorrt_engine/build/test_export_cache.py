"""An export on disk gives the same engine, is made once, and is not read if damaged or foreign."""

from __future__ import annotations

import inspect
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.quantization.onnx import Quantization
from engines.tensorrt_engine.build.export_cache import ExportCache
from engines.tensorrt_engine.export import exporter as exporter_module
from engines.tensorrt_engine.export.archive import read_export, write_export
from engines.tensorrt_engine.export.exported import EngineExport, export, rank_weights
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.export.trace import offline_team
from tests.engines.tensorrt_engine.conftest import Exports, Ring
from tests.engines.tensorrt_engine.support.all_ranks import Case, relative_error
from tests.engines.tensorrt_engine.support.cases import Key
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, reference

CPU = torch.device("cpu")
WAN = Key(family="wan", strategy="ulysses", num_ranks=2, dtype="fp32")
"""The export of most tests, which is made once and never changed."""


@pytest.mark.parametrize("family", [pytest.param("flux", marks=pytest.mark.slow), "wan"])
def test_what_is_read_again_predicts_the_same(exports: Exports, family: str) -> None:
    specimen, case = SPECIMENS[family], exports(replace(WAN, family=family))
    model, inputs = specimen.model(), specimen.inputs()
    made, weights = case.exported, case.weights[0]
    data = write_export(made)
    again = read_export(data, weights, CPU)
    assert again.graph.serialized() == made.graph.serialized()
    assert (again.graph.inputs, again.graph.weights, again.graph.outputs) == (
        made.graph.inputs,
        made.graph.weights,
        made.graph.outputs,
    )
    assert write_export(again) == data
    for prediction in Case(exported=again, weights=(weights,) * 2).predictions(inputs):
        assert relative_error(prediction, reference(model, inputs)) <= 1e-4


def test_weights_stay_out_of_the_file_and_are_bound_when_it_is_read(exports: Exports) -> None:
    """Another checkpoint's weights reach the parts that run in torch, too (this model's patch embedding)."""
    specimen = SPECIMENS["wan"]
    model, inputs = specimen.model(), specimen.inputs()
    data = write_export(exports(WAN).exported)
    with torch.no_grad():
        model.modules["transformer"].get_parameter("patch_embedding.weight").mul_(2)
    with offline_team(WAN.spec) as team:
        weights = rank_weights(model, "transformer", team)
    case = Case(exported=read_export(data, weights, CPU), weights=(weights,) * 2)
    assert relative_error(case.predictions(inputs)[1], reference(model, inputs)) <= 1e-4


def test_segments_of_a_ring_are_kept_too(ring: Ring) -> None:
    model, made = ring
    with offline_team(ParallelSpec.of("ring", 2)) as team:
        weights = rank_weights(model, "transformer", team)
    again = read_export(write_export(made), weights, CPU)
    assert again.segments == made.segments
    assert [graph.serialized() for graph in again.graphs] == [graph.serialized() for graph in made.graphs]


class CountingExporter:
    """An ``Exporter`` over one model that counts its exports and returns ``made`` instead of tracing."""

    def __init__(self, model: DenoiserModel, made: EngineExport, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_exports, self.folder = 0, folder
        self.exporter = Exporter(model=model, cache=ExportCache(folder))
        self._made = made
        monkeypatch.setattr(exporter_module, "export", self._count)

    def _count(self, *args: object, **options: object) -> EngineExport:
        inspect.signature(export).bind(*args, **options)
        self.num_exports += 1
        return self._made

    def export(self, branch: Branch, spec: ParallelSpec = WAN.spec, **changes: object) -> EngineExport:
        with offline_team(spec) as team:
            return replace(self.exporter, **changes).export((branch,), team)  # type: ignore[arg-type]


@pytest.fixture
def counted(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingExporter:
    return CountingExporter(SPECIMENS["wan"].model(), exports(WAN).exported, tmp_path, monkeypatch)


def test_the_key_holds_all_that_decides_an_export(counted: CountingExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SPECIMENS["wan"].inputs()
    branch = Branch(inputs=inputs)
    first = counted.export(branch)
    assert (
        counted.export(Branch(inputs={name: 2 * x for name, x in inputs.items()})).prologue_outputs
        == first.prologue_outputs
    )
    assert counted.num_exports == 1, "values do not matter"
    (module,) = counted.exporter.model.modules.values()
    with torch.no_grad():
        module.get_parameter("blocks.0.ffn.net.2.weight").mul_(2)
    counted.export(branch)
    assert counted.num_exports == 1, "changed weights need no export"
    wider = inputs | {"encoder_hidden_states": torch.zeros(1, 24, 32)}
    half = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].half()}
    quantized = Quantization(plan=counted.exporter.model.plan, amax={"a": 1.0}, scheme="int8")
    other = replace(quantized, amax={"a": 2.0})
    others = [
        (Branch(inputs=wider), {}),
        (Branch(inputs=half), {}),
        (branch, {"spec": ParallelSpec.of("allgather_kv", 2)}),
        (branch, {"native_ring": True}),
        (branch, {"weights_as_inputs": False}),
        (branch, {"change": lambda name: quantized}),
        (branch, {"change": lambda name: other}),
    ]
    for number, (asked, changes) in enumerate(others):
        counted.export(asked, **changes)  # type: ignore[arg-type]
        assert counted.num_exports == number + 2
    monkeypatch.setattr("engines.tensorrt_engine.build.export_cache.code_digest", lambda package: "newer code")
    counted.export(branch)
    assert counted.num_exports == len(others) + 2


def as_if(data: bytes, flag: str) -> bytes:
    """Return ``data`` with bits flipped in the archive's directory, where the first member's form is declared."""
    place, value = {"encrypted": (8, 1), "deflated": (10, 8), "of another kind": (10, 64)}[flag]
    turned = bytearray(data)
    turned[data.rindex(b"PK\1\2", 0, data.rindex(b"export.json")) + place] = value
    return bytes(turned)


def test_a_damaged_file_is_made_again(counted: CountingExporter, caplog: pytest.LogCaptureFixture) -> None:
    branch = Branch(inputs=SPECIMENS["wan"].inputs())
    good = counted.export(branch).graph.serialized()
    (path,) = counted.folder.rglob("*.zip")
    data = path.read_bytes()
    half, wrong = data[: len(data) // 2], data[:2000] + b"\x00\x01" + data[2002:]
    for damaged in (half, wrong, b"", *(as_if(data, flag) for flag in ("encrypted", "deflated", "of another kind"))):
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert counted.export(branch).graph.serialized() == good
        assert "is damaged" in caplog.text
        caplog.clear()
    assert counted.num_exports == 7


def test_of_two_that_ask_at_once_one_exports(exports: Exports, tmp_path: Path) -> None:
    case = exports(WAN)
    exporters: list[str] = []

    def slow() -> EngineExport:
        exporters.append(threading.current_thread().name)
        threading.Event().wait(0.3)
        return case.exported

    def ask() -> None:
        ExportCache(tmp_path).get_or_export("key", case.weights[0], CPU, slow)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(exporters) == 1
