"""The ``troupe`` command: in the test's own process, or in a new one with all its children."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
import ray
from typer.testing import CliRunner, Result

from benchmarks.serving.application import kill_all_in, processes_in
from deployments.cli.main import app
from deployments.cli.progress import console
from deployments.config import ServeConfig
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

SERVING = r"http://[\d.]+:\d+(?= \(docs)"
"""The URL that ``troupe serve`` prints when it is ready."""
COMMAND = (sys.executable, "-m", "deployments.cli.main")
COMMAND_S = 3 * PATIENCE_S
"""A server starts Ray and a dozen processes before it prints its address: 10 s alone, 70 s on busy cores. Commands that
start one take as long, and their end some seconds more.
"""


def troupe(*args: str) -> Result:
    """Run the command in this process, without the test's cluster, for a terminal of 200 columns without colours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        patch.setattr(console, "width", 200)  # it read the terminal's width when it was made
        return CliRunner().invoke(app, args, env={"COLUMNS": "200", "TERM": "dumb"})


def assert_one_line(result: Result, *parts: str) -> None:
    """Check a user's mistake: no traceback, but one line that names ``parts``."""
    assert result.exit_code == 2, result.output
    line, *others = result.stderr.splitlines()
    assert not others, result.stderr
    assert line.startswith("troupe: ")
    for part in parts:
        assert part in line, line


class Command:
    """A running ``program``. Its output, its data and those of its Ray cluster are all in ``folder``."""

    def __init__(
        self,
        *args: str,
        folder: Path,
        env: Mapping[str, str],
        program: tuple[str, ...] = COMMAND,
        cwd: Path | None = None,
    ) -> None:
        self._folder = folder
        self._log = folder / f"{args[0]}.log"
        own = {"TROUPE_DATA_DIR": str(folder / "data"), "RAY_TMPDIR": str(folder)}
        terminal = {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "200", "TERM": "xterm"}  # live bars, no colours
        with self._log.open("w") as file:
            # A session of its own, like a shell's job.
            self._process = subprocess.Popen(
                [*program, *args],
                stdout=file,
                stderr=file,
                env={**os.environ, **own, **terminal, **env},
                cwd=cwd,
                start_new_session=True,
                # A test run in the background of a script ignores Ctrl-C, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> str:
        """Return the first match of ``pattern`` in the output."""

        def has_matched_or_ended() -> bool:
            return self._process.poll() is not None or re.search(pattern, self.output) is not None

        wait_until(has_matched_or_ended, f"{pattern} in the output", patience_s=COMMAND_S)
        match = re.search(pattern, self.output)
        assert match is not None, self.output
        return match[0]

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Return the exit code of a command that ends by itself, once all its processes are gone."""
        code = self._process.wait(COMMAND_S)
        wait_until(lambda: not self.processes(), "all that it started is gone", patience_s=patience_s)
        return code

    def interrupt(self, *, again_after_s: float | None = None) -> int:
        """Send Ctrl-C like a terminal, to the whole foreground job. Return the exit code once all processes end."""
        os.killpg(self._process.pid, signal.SIGINT)
        if again_after_s is not None:
            time.sleep(again_after_s)
            os.killpg(self._process.pid, signal.SIGINT)
        return self.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the command itself, like service managers."""
        self._process.terminate()

    def terminate_group(self) -> int:
        """Send SIGTERM to the command's group, like ``timeout`` and supervisors. Return the exit code at its end."""
        os.killpg(self._process.pid, signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the command itself. Return once all its processes have ended as well.

        Ray's agents try for a minute to tell the head, which is dead, that their raylet is dead.
        """
        self._process.kill()
        self.wait(2 * PATIENCE_S)

    def kill_all(self) -> None:
        """Send SIGKILL to every process, until none is left."""
        kill_all_in(self._folder)
        self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """Return the running processes that it has started, and itself."""
        return processes_in(self._folder)


@contextmanager
def command(
    *args: str,
    folder: Path,
    env: Mapping[str, str] = MappingProxyType({}),
    program: tuple[str, ...] = COMMAND,
    cwd: Path | None = None,
) -> Iterator[Command]:
    """Run ``troupe ARGS``, or another program, in ``cwd``; kill what is left of it at the end."""
    running = Command(*args, folder=folder, env=env, program=program, cwd=cwd)
    try:
        yield running
    finally:
        running.kill_all()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder for a cluster of its own: sockets are in it, and their paths may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="troupe_", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def config_file(config: ServeConfig, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))  # JSON is YAML
    return str(path)
