"""A process that has imported the libraries of workers, and is forked for each of them.

``python -m deployments.zygote DIRECTORY LEVEL…`` listens on a socket ``DIRECTORY/LEVEL`` for each level. ``base`` has
the libraries of every worker of Ray Serve; ``model`` adds torch, diffusers and transformers. The client is
``deployments/worker_shim.py``. A zygote does not import Ray, whose threads and signal handlers survive no fork. It
starts no threads and does not initialize CUDA.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from deployments.forked_worker import OWN_VARIABLES, ForkedWorker
from deployments.worker_shim import CREDENTIALS, LENGTH, LEVELS, MODEL, connection_to, node_folder, read_exactly
from pipelines.libraries import quick_imports

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "base": (
        "PIL.Image",
        "fastapi_offline",
        "filelock",
        "google.protobuf.json_format",
        "google.protobuf.timestamp_pb2",
        "grpc.aio",
        "grpc_reflection.v1alpha.reflection",
        "jsonschema",
        "logging.config",
        "msgpack",
        "opentelemetry.sdk.resources",
        "opentelemetry.sdk.trace.export",
        "opentelemetry.semconv.trace",
        "packaging.version",
        "pdb",
        "psutil",
        "pydantic_settings",
        "requests",
        "tarfile",
        "tqdm.auto",
        "unittest.mock",
        "uvicorn",
        "uvicorn.lifespan.on",
        "uvloop",
        "wcwidth",
        "yaml",
        "deployments.http.openapi_text",
        "deployments.clips.clips",
        "deployments.config",
        "deployments.requests.handle",
        "deployments.stages.kernel_cache",
        "deployments.stages.measured_times",
        "engines.gang.autoscaling",
        "engines.gang.eta.admission",
        "engines.gang.jobs.job_table",
        "engines.gang.ledger",
        "engines.gang.load",
        "engines.gang.metrics",
        "engines.gang.share_group",
        "pipelines.checkpoint",
    ),
    "model": (
        "torch",
        "engines.gang.communicator",
        "engines.gang.jobs.rank_jobs",
        "engines.parallel.early_start",
        "engines.registry",
        "engines.torch_engine.load",
        "engines.warm_up",
        "pipelines.blocks.blank",
        "pipelines.blocks.decoder",
        "pipelines.blocks.denoiser",
        "pipelines.blocks.encoder",
        "pipelines.blocks.opened",
        "pipelines.blocks.sampler",
        "diffusers.guiders",
        "diffusers.pipelines.auto_pipeline",
        "av",
    ),
}
"""Modules that workers of each level import for every model. A level includes those of the levels before it."""
TRITON_LIBRARIES = tuple(f"engines.fast.triton_{name}" for name in ("kernels", "group_norm", "frames"))
"""Modules that workers of the level "model" import too, where Triton is installed."""
IDLE_S = 30.0
"""Time without workers after which a zygote without a lifeline ends."""
END_WITHIN_S = 3.0
"""Time for workers to end once the application's process, or the raylet, is gone."""
ANSWER_WITHIN_S = 5.0
LOOK_EVERY_S = 1.0
MAX_WAITING_CALLS = 128
NUM_STREAMS = 3


class Zygote:
    """Accepts calls at ``listener`` and forks, in ``run``, without threads.

    ``lifeline`` can be read when the application's process, or the node's raylet, has ended. Without one it ends after
    ``IDLE_S`` without workers. ``environment`` are the variables at the imports.
    """

    def __init__(self, listener: socket.socket, lifeline: int | None, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._listener, self._lifeline = listener, lifeline
        self._workers: dict[int, socket.socket] = {}
        self._end_s: float | None = None
        self._busy_s = time.monotonic()
        self._wakeups, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeups, selectors.EVENT_READ, self._reap)
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self._lose_lifeline)

    def run(self) -> ForkedWorker | None:
        """Serve until the end and return None; in a fork, return its worker."""
        while not self._is_over():
            for key, _ in self._selector.select(timeout=LOOK_EVERY_S):
                handle: Callable[[Any], ForkedWorker | None] = key.data
                if (worker := handle(key.fileobj)) is not None:
                    return worker
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        return None

    def _is_over(self) -> bool:
        now_s = time.monotonic()
        if self._workers:
            self._busy_s = now_s
        if self._end_s is not None:
            return not self._workers or now_s > self._end_s
        return self._lifeline is None and now_s - self._busy_s > IDLE_S

    def _lose_lifeline(self, lifeline: int) -> None:
        self._selector.unregister(lifeline)
        self._selector.unregister(self._listener)
        self._end_s = time.monotonic() + END_WITHIN_S

    def _accept(self, listener: socket.socket) -> ForkedWorker | None:
        connection, _ = listener.accept()
        connection.settimeout(ANSWER_WITHIN_S)
        streams: list[int] = []
        try:
            head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, NUM_STREAMS)
            if peer_of(connection) == os.getuid() and len(head) == LENGTH.size and len(streams) == NUM_STREAMS:
                worker = ForkedWorker.parsed(read_exactly(connection, LENGTH.unpack(head)[0]), streams)
                reason = worker.refusal(self._environment)
                if not reason:
                    return self._fork(worker, connection)
                send(connection, {"refusal": reason})
        except (OSError, ValueError, KeyError) as error:
            print(f"zygote: a call could not be answered: {error!r}", file=sys.stderr, flush=True)
        finally:
            for stream in streams:
                os.close(stream)
        connection.close()
        return None

    def _fork(self, worker: ForkedWorker, connection: socket.socket) -> ForkedWorker | None:
        pid = os.fork()
        if pid:
            self._workers[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, self._lose_shim)
            send(connection, {"pid": pid})
            return None
        signal.set_wakeup_fd(-1)
        worker.take_streams()
        for inherited in (*self._workers.values(), connection, self._listener):
            inherited.close()
        self._selector.close()
        for descriptor in (self._wakeups, self._wakeup, self._lifeline):
            if descriptor is not None:
                os.close(descriptor)
        return worker

    def _reap(self, wakeups: int) -> None:
        """Send the status of ended workers to their shims."""
        with suppress(BlockingIOError):
            os.read(wakeups, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._workers.pop(ended[0], None)
                if connection is None:  # the zygote of the next level
                    continue
                with suppress(KeyError):
                    self._selector.unregister(connection)
                send(connection, {"status": os.waitstatus_to_exitcode(ended[1])})
                connection.close()

    def _lose_shim(self, connection: socket.socket) -> None:
        """Kill the worker of a shim that ended: Ray takes the shim for the worker."""
        if connection.fileno() < 0:  # the worker ended just before, and ``_reap`` has closed it
            return
        self._selector.unregister(connection)
        for pid, held in self._workers.items():
            if held is connection:
                os.kill(pid, signal.SIGKILL)


def peer_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user)


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send ``message`` to a shim, if it still lives."""
    data = json.dumps(message).encode()
    with suppress(OSError):
        connection.sendall(LENGTH.pack(len(data)) + data)


def listen(path: Path) -> socket.socket:
    """Listen at ``path``; calls wait there until libraries are imported."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(MAX_WAITING_CALLS)
    return listener


def libraries_of(level: str) -> tuple[str, ...]:
    """Return the modules that workers of ``level`` import on this host, beside those of the levels before it."""
    has_triton = level == MODEL and importlib.util.find_spec("triton") is not None
    return LIBRARIES[level] + (TRITON_LIBRARIES if has_triton else ())


def import_libraries(level: str) -> None:
    """Import the libraries of ``level``. A missing one is logged; a worker that needs it fails by itself."""
    with quick_imports() if level == MODEL else nullcontext():
        for name in libraries_of(level):
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()
    gc.collect()
    gc.freeze()


def keep_bytecode(directory: Path) -> None:
    """Let this process and its forks keep bytecode below ``directory``, if Ray has none and Python would write none.

    Each fork imports hundreds of Ray's modules, and would compile all of them again.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return
    cached, folder = Path(importlib.util.cache_from_source(spec.origin)), os.path.dirname(spec.origin)
    is_written = not sys.dont_write_bytecode and (sys.pycache_prefix or os.access(folder, os.W_OK))
    if not cached.exists() and not is_written:
        sys.pycache_prefix, sys.dont_write_bytecode = str(directory / "bytecode"), False


def serve(
    directory: Path, levels: Sequence[str], lifeline: int | None, environment: Mapping[str, str]
) -> ForkedWorker | None:
    """Serve the first of ``levels`` here, and each further one in a fork, which has the libraries of those before."""
    listeners = [listen(directory / level) for level in levels]
    for level in LEVELS[: LEVELS.index(levels[0])]:
        import_libraries(level)
    for place, level in enumerate(levels):
        import_libraries(level)
        successor = os.fork() if place + 1 < len(levels) else None
        if successor != 0:
            break
        listeners[place].close()
    for other in listeners[place + 1 :]:
        other.close()
    worker = Zygote(listeners[place], lifeline, environment).run()
    if worker is None:
        (directory / level).unlink(missing_ok=True)
        if successor is not None:
            with suppress(ChildProcessError):  # ``Zygote._reap`` may have waited for it
                os.waitpid(successor, 0)
        if lifeline is not None and place == 0:  # the process that made the folder may be dead
            shutil.rmtree(directory, ignore_errors=True)
    return worker


def sweep_nodes(own: Path) -> None:
    """Delete this user's folders of raylets that have ended, if no zygote listens there; ``own`` is this raylet's."""
    for folder in own.parent.glob(Path(node_folder("*")).name):
        raylet = folder.name.split("_")[2]
        if folder == own or not raylet.isdecimal() or os.path.exists(f"/proc/{raylet}"):
            continue
        connections = [connection_to(str(folder / level)) for level in LEVELS]
        for connection in filter(None, connections):
            connection.close()
        with suppress(OSError):
            if not any(connections) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def raylet_end(directory: Path) -> int | None:
    """Return a descriptor that can be read when the raylet that ``directory`` is named after ends; None without one."""
    raylet = directory.name.split("_")[2:3]
    try:
        return os.pidfd_open(int(*raylet))
    except (OSError, ValueError):
        return None


def main() -> None:
    """Serve until the end, or run a worker in a fork."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("levels", nargs="+", choices=LEVELS)
    parser.add_argument("--lifeline", type=int, help="the reading end of a pipe; by default the node's raylet")
    chosen = parser.parse_args()
    environment = dict(os.environ)
    os.environ.update(OWN_VARIABLES)
    if chosen.lifeline is None:
        sweep_nodes(chosen.directory)
    else:  # without one, nothing removes the folder
        keep_bytecode(chosen.directory)
    lifeline = raylet_end(chosen.directory) if chosen.lifeline is None else chosen.lifeline
    worker = serve(chosen.directory, chosen.levels, lifeline, environment)
    if worker is not None:
        worker.run({name: value for name, value in os.environ.items() if name not in environment})


if __name__ == "__main__":
    main()
