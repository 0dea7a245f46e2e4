"""The table's remarks on models seen on a GPU come from the results of sweeps."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.fenced import ROOT

RIGHT = {
    "model": "FLUX.1-dev",
    "ranks": 1,
    "date": "2026-11-27",
    "hardware": "NVIDIA H200",
    "through": "application",
    "size": "1024x1024",
    "step_ms": 71.5,
    "captured": True,
    "same_bytes": True,
}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        module = importlib.import_module("models_facts")
        patch.setattr(module, "RESULTS", tmp_path / "sweep.jsonl")
        module.swept.cache_clear()
        yield module
        module.swept.cache_clear()


def write(module: ModuleType, *results: dict[str, Any]) -> None:
    module.RESULTS.write_text("".join(f"{json.dumps(one)}\n" for one in results))


def test_without_results_it_says_so(program: ModuleType) -> None:
    assert program.seen("FLUX.1-dev") == "not yet"


def test_the_newest_of_each_number_of_gpus_is_told(program: ModuleType) -> None:
    lone = {"through": "transformer and decoder", "captured": False, "same_bytes": False, "step_ms": 9.0}
    write(program, {**RIGHT, "error": "x"}, RIGHT, {**RIGHT, "ranks": 2, **lone}, {**RIGHT, "hardware": "CPU"})
    assert program.seen("FLUX.1-dev") == (
        "2026-11-27, 1 × H200, 1024x1024: 71.5 ms; 2026-11-27, 2 × H200, 1024x1024: 9.0 ms "
        "(transformer and decoder alone, not captured, not the same bytes twice)"
    )
    assert program.seen("FLUX.2-dev") == "not yet"


def test_a_reason_is_one_cell(program: ModuleType) -> None:
    failed = {key: RIGHT[key] for key in ("model", "ranks", "date", "hardware")}
    write(program, {**failed, "error": "Traceback:\n  File\nRuntimeError: no | picture, but 500\n"})
    assert program.seen("FLUX.1-dev") == "2026-11-27, 1 × H200: failed (RuntimeError: no / picture, but 500)"
