"""Commands find a server of this machine, and end one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.cli import operation
from tests.deployments.support.commands import assert_one_line, troupe
from tests.support.fenced import ROOT

SERVER = """
import signal, sys
from deployments.cli.operation import announce
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
announce(sys.argv[1], "http://127.0.0.1:9/metrics")
print("announced", flush=True)
signal.pause()
"""


@contextmanager
def server(url: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that announces itself as the server at ``url``; with ``args`` it ignores requests to end."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, url, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "announced\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    return tmp_path


def test_one_is_found_and_ended() -> None:
    with server("http://127.0.0.1:8000") as process:
        found = operation.the_server()
        assert (found.pid, found.url, found.port) == (process.pid, "http://127.0.0.1:8000", 8000)
        stopped = troupe("stop")
        assert stopped.exit_code == 0, stopped.output
        assert f"http://127.0.0.1:8000 (process {process.pid}) ended after" in stopped.output
        assert process.wait() == -signal.SIGTERM
    assert_one_line(troupe("stop"), "no server runs here")


def test_generate_and_models_use_it_unless_a_config_is_given(tmp_path: Path) -> None:
    with server("http://127.0.0.1:9"):
        for command in (["models"], ["generate", "a red circle", "--out", str(tmp_path / "a.png")]):
            assert_one_line(troupe(*command), "http://127.0.0.1:9")
        assert "flux-shapes" in troupe("models", "--config", "laptop").output


def test_one_that_was_killed_is_no_server() -> None:
    with server("http://127.0.0.1:8000") as process:
        process.kill()
        process.wait()
        assert list(operation.folder().glob("*.json")) != []
        assert_one_line(troupe("stop"), "no server runs here")
        assert_one_line(troupe("status"), "no server runs here")


def test_of_two_the_port_says_which() -> None:
    with server("http://127.0.0.1:8000") as first, server("http://127.0.0.1:8001") as second:
        assert_one_line(troupe("stop"), "several servers run here", ":8000", ":8001", "--url", "--port")
        assert_one_line(troupe("stop", "--port", "9"), "port 9", ":8000", ":8001")
        assert troupe("stop", "--port", "8001").exit_code == 0
        assert second.wait() == -signal.SIGTERM
        assert first.poll() is None
        assert [one.port for one in operation.servers()] == [8000]


def test_one_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with server("http://127.0.0.1:8000", "stubborn") as process:
        refused = troupe("stop", "--timeout", "0")
        assert_one_line(refused, f"process {process.pid}", "still runs", f"kill -9 {process.pid}")
        assert process.poll() is None
