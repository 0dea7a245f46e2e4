"""Commands and cluster set-up for workers that are forked from a process with their libraries."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import ray

from deployments.forked_worker import ROOT
from deployments.places import OwnedFolder
from deployments.ray_private import worker_setup_script
from deployments.settings import process_environment, variables_set
from deployments.worker_shim import DIRECTORY_VARIABLE, FOLDER

Level = Literal["base", "model"]
"""Libraries that a worker has at its start; "model" includes torch."""
Pythons = Mapping[Level, str]
LEVELS: tuple[Level, ...] = ("base", "model")
SHIM = Path(__file__).with_name("worker_shim.py")
OWN_PYTHON = frozenset({"py_executable", "pip", "uv", "conda", "container", "image_uri"})
"""Fields of a runtime environment that select another interpreter, whose workers cannot be forks of this one."""
SOCKETS_WITHIN_S, END_WITHIN_S = 10.0, 15.0

logger = logging.getLogger("troupe.serving")


def application_environment() -> dict[str, Any]:
    """Return Ray's ``runtime_env`` of this process, in which Serve builds the application."""
    return dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}


def worker_pythons() -> Pythons:
    """Return the command that runs a worker of each level; empty if the job selects another interpreter."""
    if OWN_PYTHON & application_environment().keys():
        return {}
    return {level: forking_python(level) for level in LEVELS}


def forking_python(level: Level) -> str:
    """Return the command that forks a process of ``level``, with a script and arguments as for ``python``."""
    return f"{sys.executable} -I -S {SHIM} {level}"


def python_like_own(level: Level) -> str:
    """Return the command for workers of ``level`` that this worker starts; empty unless it is a fork."""
    own = ray.get_runtime_context().runtime_env.get("py_executable")
    return forking_python(level) if own == forking_python("base") else ""


@contextmanager
def forking_cluster() -> Iterator[None]:
    """Run a zygote, from which the workers of a cluster started inside the block are forked.

    The zygote and remaining workers end with the block or this process.
    """
    folder = OwnedFolder.make(Path(FOLDER), "troupe_zygotes_")
    directory = folder.path
    lifeline, held = os.pipe()
    zygote = _start_zygote(directory, lifeline)
    os.close(lifeline)
    try:
        _await_sockets(directory, zygote)
        with worker_setup_script(SHIM), variables_set({DIRECTORY_VARIABLE: str(directory)}):
            yield
    finally:
        os.close(held)
        _wait(zygote)
        folder.delete()


def _start_zygote(directory: Path, lifeline: int) -> subprocess.Popen[bytes]:
    environment = process_environment()
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "deployments.zygote", directory, *LEVELS, "--lifeline", str(lifeline)],
            env={**environment, "PYTHONPATH": path},
            pass_fds=[lifeline],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _await_sockets(directory: Path, zygote: subprocess.Popen[bytes]) -> None:
    """Wait until the zygote's sockets exist; libraries may not be imported yet."""
    end_s = time.monotonic() + SOCKETS_WITHIN_S
    while not all((directory / level).exists() for level in LEVELS):
        if zygote.poll() is not None or time.monotonic() > end_s:
            logger.warning("no workers can be forked: %s", (directory / "log").read_text().strip() or "no answer")
            return
        time.sleep(0.01)


def _wait(zygote: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        zygote.wait(END_WITHIN_S)
        return
    logger.warning("the zygote did not end within %g s and is killed", END_WITHIN_S)
    zygote.kill()
    zygote.wait()
