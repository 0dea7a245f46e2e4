"""A started application comes to rest."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import application
from benchmarks.serving.application import REST_CORES, REST_LOOKS, Application
from deployments.cli.serving import load_config
from tests.support.patience import PATIENCE_S

QUIET, BUSY = 0.4 * REST_CORES, 2 * REST_CORES


def rests(shares: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``rest`` with these numbers of cores in use."""
    monkeypatch.setattr(Application, "cpu_share", lambda _self, _over_s: next(shares))
    one = Application(url="", ready_s=1.0, process=psutil.Process(), logs=Path(), data_dir=Path())
    one.rest()


def test_it_is_at_rest_once_all_that_starts_later_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([*[QUIET] * (REST_LOOKS - 1), BUSY, *[QUIET] * REST_LOOKS, BUSY])
    rests(shares, monkeypatch)
    assert list(shares) == [BUSY]


def test_one_that_is_never_at_rest_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(application, "AT_REST_WITHIN_S", 0.0)
    rests(iter([BUSY]), monkeypatch)
    assert "not at rest within 0 s" in capsys.readouterr().err


IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUBBORN = f"{IGNORE}; import time; print('on', flush=True); time.sleep(600)"


def runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def test_what_does_not_end_in_time_is_killed_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remaining processes would hold memory of GPUs."""
    monkeypatch.setattr(application, "STOPPED_WITHIN_S", 0.1)
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", f"{IGNORE}; {parent}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    (child,) = psutil.Process(process.pid).children()
    with pytest.raises(subprocess.TimeoutExpired):
        application.end(process)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert process.stdout.read() == b"", "the child, which has it too, is gone"
    end_s = time.monotonic() + PATIENCE_S
    while runs(child) and time.monotonic() < end_s:  # its files are closed a moment before it is a zombie
        time.sleep(0.01)
    assert not runs(child)


def test_a_server_that_has_ended_needs_no_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(PATIENCE_S)
    application.end(process)


def test_what_torch_said_of_memory_is_found_in_the_logs(tmp_path: Path) -> None:
    logs = tmp_path / "tr_1" / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "log").write_text("starting\n")
    assert application.out_of_memory(tmp_path) == ""
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
    (logs / "worker-1.err").write_text(f'{{"level": "error", "error": "OutOfMemoryError: {said}\\nTraceback"}}\n')
    assert application.out_of_memory(tmp_path) == said


def test_a_process_that_torch_memory_saver_ended_is_found(tmp_path: Path) -> None:
    logs = tmp_path / "tr_1" / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "log").write_text("starting\n")
    said = "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=1"
    (logs / "worker-1.err").write_text(f":actor_name:Rank\nloading\n{said}\n")
    assert application.out_of_memory(tmp_path) == said


def test_logs_of_a_start_that_failed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server writes to the folder of its logs, and ends before it is ready."""
    write = (
        "import os, pathlib, sys; logs = pathlib.Path(os.environ['RAY_TMPDIR'], 'tr_1/r/session_2026/logs');"
        "logs.mkdir(parents=True); (logs / 'worker-1.err').write_text('CUDA out of memory. Tried'); sys.exit('no room')"
    )
    monkeypatch.setattr(application, "COMMAND", (sys.executable, "-c", write))
    kept, config = tmp_path / "kept", load_config("laptop")
    with (
        pytest.raises(RuntimeError, match="ended with 1:\nno room") as failed,
        application.serving(config, keep_logs_in=kept),
    ):
        pass
    assert (kept / "worker-1.err").read_text() == "CUDA out of memory. Tried"
    assert (kept / "server.log").read_text() == "no room\n"
    assert failed.value.__notes__ == ["CUDA out of memory. Tried"]
