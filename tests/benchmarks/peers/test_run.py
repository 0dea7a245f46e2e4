"""From archives to stages, on a host that has none of the peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.peers import run
from tests.support.patience import PATIENCE_S


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
        (work / f"{name}.json").write_text(json.dumps({"results": [{"case": name}]}))
    (work / "meeting-stage").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(2):
        run.gather(work, out)
    assert {path.name for path in out.iterdir()} == {"logs.txt", "results.jsonl"}
    assert (out / "logs.txt").read_text() == "## first\n first\n## second\nsecond\n"
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert found == [{"stage": name, "case": name} for name in ("first", "second")]


def test_what_there_is_can_be_read_while_stages_run(
    monkeypatch: pytest.MonkeyPatch, work: Path, tmp_path: Path
) -> None:
    """The second of two stages ends when the gist of the first is there, or never."""
    (tmp_path / "benchmarks/denoise_step").mkdir(parents=True)
    (tmp_path / "benchmarks/denoise_step/gpu.py").write_text(
        "import pathlib, sys, time\n"
        "work, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).parent / 'out'\n"
        "(work / 'one.log').write_text(' '.join(sys.argv[2:]))\n"
        "while not (out / 'logs.txt').exists(): time.sleep(0.05)\n"
        "sys.exit(3)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "GATHER_S", 0.2)
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run.perform(("one", "other"), 60, work, tmp_path / "out", environment) == 3
    assert (tmp_path / "out/logs.txt").read_text() == "## one\n--limit-s=60 --stages one other\n"


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


def test_a_check_that_fails_is_named_with_the_end_of_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks/peers").mkdir(parents=True)
    (tmp_path / "benchmarks/peers/check.py").write_text(
        "import sys\nprint(sys.argv[1], 'is here')\nsys.exit(3 * (sys.argv[1] == 'bad'))"
    )
    monkeypatch.chdir(tmp_path)
    assert run.check(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}, ("bad", "good")) == ["bad"]
    assert capsys.readouterr().out.splitlines() == [
        "check bad: FAILED (3)",
        "bad is here",
        "check good: good: good is here",
    ]


def test_a_check_that_does_not_end_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks/peers").mkdir(parents=True)
    (tmp_path / "benchmarks/peers/check.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run.check(tmp_path, environment, ("slow",), limit_s=1) == ["slow"]
    assert "stopped after 1 s" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_gpu_all_is_said_and_nothing_is_timed(archive: Path, tmp_path: Path) -> None:
    limits = ["--limit-s", str(round(3 * PATIENCE_S)), "--check-s", str(2 * PATIENCE_S)]
    options = [*limits, "--sites", str(tmp_path / "sites"), "--stages", "peers_of_one"]
    command = [sys.executable, "-m", "benchmarks.peers.run", str(tmp_path / "out"), str(archive), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run.ROOT, env=environment)
    lines = ended.stdout.splitlines()
    assert {"check attention: FAILED (1)", "check sglang: FAILED (1)", "check vllm_omni: FAILED (1)"} < {*lines}
    outcome = json.loads(lines[-1])["stages"]["peers_of_one"]
    assert outcome.startswith("skipped: 0 GPUs")
