"""Both models train side by side: each one's results stay, whatever fails in the other or later."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.__main__ import LENGTHS, TRAINERS, WORDINGS, Attempt
from training.options import flow_options


class Calls:
    """Stands for processes: records the calls, and exports a file when a trainer should."""

    def __init__(self, failing: str = "") -> None:
        self.made: list[tuple[str, list[str], str]] = []
        self._failing = failing

    def run(self, command: list[str], *, timeout: float, **how: Any) -> SimpleNamespace:
        assert 0 < timeout <= 100
        _, gpu, _, interpreter, _, module, *options = command
        assert interpreter == sys.executable
        self.made.append((module, options, gpu))
        if module == self._failing:
            raise subprocess.TimeoutExpired(command, timeout)
        if "--export" in options:
            folder = Path(options[options.index("--export") + 1])
            folder.mkdir(parents=True)
            (folder / "weights").write_text(module)
        return SimpleNamespace(returncode=0)


def attempt(monkeypatch: pytest.MonkeyPatch, calls: Calls, out: Path, model: str = "wan-shapes") -> Attempt:
    monkeypatch.setattr(subprocess, "run", calls.run)
    return Attempt(model=model, gpu=1, out=out, end_s=time.monotonic() + 100)


@pytest.mark.parametrize("model", TRAINERS)
def test_a_model_is_kept_before_it_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> None:
    calls = Calls(failing="training.evaluate")
    assert not attempt(monkeypatch, calls, tmp_path, model).run()
    (trainer, options, gpu), *evaluations = calls.made
    assert (trainer, gpu) == (f"training.{model.replace('-', '_')}", "CUDA_VISIBLE_DEVICES=1")
    assert len(evaluations) == len(WORDINGS)
    with tarfile.open(tmp_path / f"{model}.tar") as tar:
        assert {Path(name).name for name in tar.getnames()} == {model, "weights", "README.md", "troupe.json"}
    known = flow_options("", minutes=1, batch=1, pool=1, chunk=1).parse_known_args(options)[0]
    assert known.captions >= 200_000
    assert known.minutes == float(options[options.index("--minutes") + 1])


def test_every_wording_is_evaluated_with_short_and_long_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls()
    assert attempt(monkeypatch, calls, tmp_path).run()
    _, *evaluations = calls.made
    wordings = [options[options.index("--wordings") + 1] for _, options, _ in evaluations]
    assert sorted(wordings) == sorted(WORDINGS)
    assert all(options[options.index("--lengths") + 1 :][:2] == list(LENGTHS) for _, options, _ in evaluations)


def test_without_an_export_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = Calls(failing="training.wan_shapes")
    assert not attempt(monkeypatch, calls, tmp_path).run()
    assert len(calls.made) == 1
    assert not list(tmp_path.glob("*.tar"))
