"""Archives become stages on a host without any peer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.model_step import CLIPS, MODELS, parse
from benchmarks.peers import run
from benchmarks.peers.run import Run
from engines.core.spec import ParallelSpec
from tests.support.patience import PATIENCE_S

FACTS = {"hardware": "1 x H200", "torch": "2.11", "python_s": 0.6}
CHECKS_S = 30
"""Seconds before the first run, in which peers are unpacked and checked."""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "peer.py").write_text("version = 1")
    with tarfile.open(tmp_path / "peers.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "peer.py", "peer.py")
    return tmp_path / "peers.tar.xz"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_few_files_are_left_and_each_log_s_end_is_in_one(
    monkeypatch: pytest.MonkeyPatch, work: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "MOST_LOGGED", 6)
    for name in ("first", "second"):
        (work / f"{name}.log").write_text(f"much of {name}")
        os.utime(work / f"{name}.log", (len(name), len(name)))
        (work / f"{name}.json").write_text(json.dumps({**FACTS, "results": [{"maker": name}]}))
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(2):
        run.gather(work, out, {})
    assert {path.name for path in out.iterdir()} == {"logs.txt", "results.jsonl"}
    assert (out / "logs.txt").read_text() == "## first\n first\n## second\nsecond\n"
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert found == [{"stage": name, **FACTS, "maker": name} for name in ("first", "second")]


def script(folder: Path, text: str) -> str:
    """Return the name of a module that other processes can run."""
    (folder / "scripted.py").write_text(text)
    return "scripted"


def runs(module: str, *sizes: int, limit_s: int = 60) -> list[Run]:
    return [
        Run(name=f"r{i}", gpus=n, likely_s=1, limit_s=limit_s, words=f"r{i}", module=module)
        for i, n in enumerate(sizes)
    ]


def performed(some: Sequence[Run], gpus: Sequence[str], folder: Path, within_s: float = 600) -> dict[str, str]:
    (folder / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(run.ROOT)))}
    return run.perform(some, gpus, time.monotonic() + within_s, folder / "work", folder / "out", environment)


@pytest.mark.usefixtures("work")
def test_what_there_is_can_be_read_while_runs_go_on_and_small_ones_go_on_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of two runs ends only when the other's summary is there."""
    text = """
import os, pathlib, sys, time
work, out = (pathlib.Path(__file__).parent / name for name in ("work", "out"))
print(os.environ["CUDA_VISIBLE_DEVICES"], int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) >= 4, flush=True)
(work / f"{sys.argv[1]}.json").write_text('{"hardware": "h", "torch": "t", "python_s": 1, "results": [{"maker": "m"}]}')
while not (out / "logs.txt").exists() or (out / "logs.txt").read_text().count("##") < 2: time.sleep(0.05)
sys.exit(3 * (sys.argv[1] == "r1"))
"""
    monkeypatch.setattr(run, "GATHER_S", 0.2)
    outcome = performed(runs(script(tmp_path, text), 1, 1), ("5", "GPU-8932f937"), tmp_path)
    assert [outcome[name].split(" after")[0] for name in ("r0", "r1")] == ["exit 0", "exit 3"]
    logs = (tmp_path / "out/logs.txt").read_text().split("## ")
    assert sorted(logs) == ["", "r0\n5 True\n\n", "r1\nGPU-8932f937 True\n\n"]
    found = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [(one["stage"], one["runs_beside"]) for one in found] == [("r0", 1), ("r1", 1)]


@pytest.mark.usefixtures("work")
def test_a_run_waits_for_its_gpus_and_what_needs_more_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setattr(Run, "command", lambda one, _: [sys.executable, "-m", one.module, one.words])
    outcome = performed(runs(script(tmp_path, text), 4, 2, 1, 1, 2), ("0", "1"), tmp_path)
    assert outcome.pop("r0") == "skipped: 2 GPUs"
    assert {one.split(" after")[0] for one in outcome.values()} == {"exit 0"}
    said = {path.stem: path.read_text().strip() for path in (tmp_path / "work").glob("*.log")}
    assert (said["r1"], sorted((said["r2"], said["r3"])), sorted(said["r4"])) == ("0,1", ["0", "1"], [",", "0", "1"])


@pytest.mark.usefixtures("work")
def test_a_run_that_hangs_is_stopped_and_without_time_none_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "SMALLEST_LIMIT_S", 0)
    hangs = script(tmp_path, "import time\nprint('compiling', flush=True)\ntime.sleep(600)")
    outcome = performed(runs(hangs, 1, 1, limit_s=1), ("0",), tmp_path, 1)
    assert outcome["r0"].startswith("stopped after")
    assert outcome["r1"].startswith("skipped: ")
    assert f"== r0: {outcome['r0']}" in capsys.readouterr().out


def test_a_result_that_was_being_written_costs_no_other_and_errors_are_short(work: Path) -> None:
    (work / "half.json").write_text('{"results": [{"ca')
    error = f"{'x' * 1000}{run.ROOT}/benchmarks/peers"
    (work / "whole.json").write_text(json.dumps({**FACTS, "results": [{"maker": "m", "error": error}]}))
    (found,) = run.collect(work, {"whole": 2})
    assert found == {"stage": "whole", **FACTS, "maker": "m", "runs_beside": 2, "error": found["error"]}
    assert found["error"].endswith("xbenchmarks/peers")
    assert len(found["error"]) == run.ERROR_SAID


def test_what_a_compiler_tries_is_no_news() -> None:
    tried = (
        "AUTOTUNE addmm(128x256)",
        "  triton_mm_3 0.0216 ms 100.0% ",
        "strides: [0, 1]",
        "INFO 11-23 11:56:07 [compile]",
        "",
        "x OMP_NUM_THREADS",
    )
    assert all(run.NOISE.match(line) for line in tried)
    assert not run.NOISE.match("model FLUX.1-dev, size 1024x1024x1, floor_ms 94.1")


@pytest.mark.parametrize("one", run.chosen(()), ids=lambda one: one.name)
def test_runs_name_models_and_makers_that_are_known_and_fit_their_gpus(one: Run) -> None:
    """A maker that may hang comes after its base maker. diffusers divides a model for good."""
    assert 0 < one.likely_s < one.limit_s
    if one.module != run.MODEL_STEP:
        return
    arguments = parse(shlex.split(one.words))
    assert {*arguments.models} <= {*MODELS, *CLIPS, "FLUX.1-dev", "flux-3-image-klein"}
    bases = [(maker, maker.removesuffix("-captured")) for maker in arguments.makers]
    assert all(arguments.makers.index(base) < arguments.makers.index(maker) for maker, base in bases if maker != base)
    for strategy in arguments.strategies:
        spec = ParallelSpec.of(strategy, one.gpus)
        assert spec.num_ranks == one.gpus
        assert "guidance" not in strategy or spec.guidance == arguments.branches == 2
    divides = [base for _, base in bases if base in ("diffusers", "diffusers-ring")]
    assert one.gpus == 1 or not divides or {*divides} == {base for _, base in bases}


def test_runs_at_best_settings_fit_into_one_call_on_four_gpus() -> None:
    best = run.chosen(["best"])
    assert sum(one.likely_s * one.gpus for one in best) / 4 <= 540 - CHECKS_S
    assert run.chosen(["best_quad", "best"])[:2] == run.chosen(["best_quad", "best_quad_diffusers"])
    names = [one.name for one in run.chosen(())]
    assert len({*names}) == len(names)


def test_an_archive_is_unpacked_once_and_what_was_left_half_unpacked_is_not_taken(
    archive: Path, tmp_path: Path
) -> None:
    site = run.unpacked(archive, tmp_path / "sites")
    assert (site / "peer.py").read_text() == "version = 1"
    (site / "peer.py").write_text("version = 2")
    assert (run.unpacked(archive, tmp_path / "sites") / "peer.py").read_text() == "version = 2"
    (site / "late.py").touch()
    site.rename(site.with_suffix(".half"))
    assert [path.name for path in run.unpacked(archive, tmp_path / "sites").iterdir()] == ["peer.py"]


def test_another_archive_has_another_folder(archive: Path, tmp_path: Path) -> None:
    first = run.unpacked(archive, tmp_path / "sites")
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tmp_path / "peer.py", "renamed.py")
    second = run.unpacked(archive, tmp_path / "sites")
    assert first != second
    assert [path.name for path in second.iterdir()] == ["renamed.py"]


def test_what_python_finds_already_is_found_before_archives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/host{os.pathsep}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = run.environment_with([tmp_path / "one", tmp_path / "other"])
    found = environment["PYTHONPATH"].split(os.pathsep)
    assert found == [str(run.ROOT), "/host", str(tmp_path / "one"), str(tmp_path / "other")]
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert (run.ROOT / "benchmarks/peers/run.py").is_file()


@pytest.mark.parametrize("given", [None, "/opt/cuda"])
def test_compilers_are_those_of_the_environment_or_of_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").touch(mode=0o755)
    monkeypatch.setattr(run, "CUDA", tmp_path / "missing")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda/bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if given:
        monkeypatch.setenv("CUDA_HOME", given)
    environment = run.environment_with([tmp_path / "site"])
    assert environment["CUDA_HOME"] == (given or str(tmp_path / "cuda"))
    assert run.tools(environment).startswith("nvcc: missing" if given else f"nvcc: {tmp_path}/cuda/bin/nvcc")


@pytest.mark.slow
def test_without_a_gpu_all_is_said_and_nothing_is_timed(archive: Path, tmp_path: Path) -> None:
    options = ["--limit-s", str(round(3 * PATIENCE_S)), "--sites", str(tmp_path / "sites"), "--stages", "best_one"]
    command = [sys.executable, "-m", "benchmarks.peers.run", str(tmp_path / "out"), str(archive), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run.ROOT, env=environment)
    lines = ended.stdout.splitlines()
    assert json.loads(lines[-1])["stages"] == {"best_one": "skipped: 0 GPUs"}
