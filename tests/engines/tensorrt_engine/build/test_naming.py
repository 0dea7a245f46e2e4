"""The error of a failed export or build names the model and what works; TensorRT's words are the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.core.engine import RankContext
from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine import load
from engines.tensorrt_engine.build import report
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildError
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.export import exporter
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.export.trace import offline_team
from engines.tensorrt_engine.rules import TensorRTOptions
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS

FLUX, SM89 = SPECIMENS["flux"], Target.parse("sm89")
WORDS = "Invalid Node - node_squeeze"
SENTENCE = f"engine of FluxTransformer2DModel with ulysses2: .*engine: torch. Its own words: {WORDS}"


def refuse(*_: Any, **__: Any) -> Any:
    raise BuildError(WORDS)


def test_the_command_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "_export", lambda *_: ["a graph"])
    monkeypatch.setattr(report, "cached_engine", refuse)
    config, branches = TensorRTConfig(options=TensorRTOptions(cache_dir=tmp_path)), [Branch(inputs=FLUX.inputs())]
    with pytest.raises(BuildError, match=SENTENCE) as raised:
        report.build_engine(FLUX.model(), branches, config=config, num_ranks=2, target=SM89, visible=False)
    assert str(raised.value.__cause__) == WORDS


def test_a_rank_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "cached_engine", refuse)
    config, graph = TensorRTConfig(options=TensorRTOptions(cache_dir=tmp_path)), object()
    context = RankContext(rank=0, num_ranks=2, device="cpu")
    make = load.engine_runners(config, FLUX.model(), context, SM89)
    with (
        offline_team(ParallelSpec.of("ulysses", 2)) as team,
        pytest.raises(BuildError, match=SENTENCE),
    ):
        make(graph, {}, team)  # type: ignore[arg-type]


def test_an_export_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_export(*_: Any, **__: Any) -> Any:
        raise ValueError("this model masks keys: use engine: torch")

    monkeypatch.setattr(exporter, "export", refuse_export)
    with (
        offline_team(ParallelSpec.of("ulysses", 2)) as team,
        pytest.raises(ValueError, match="FluxTransformer2DModel in TensorRT: this model masks keys: use engine: torch"),
    ):
        Exporter(model=FLUX.model()).export([Branch(inputs=FLUX.inputs())], team)
