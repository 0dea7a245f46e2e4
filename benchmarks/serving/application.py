"""The application as a user starts it: ``troupe serve`` in its own process, with its start, memory and CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from deployments.cli.local import http_client
from deployments.cli.worker_logs import memory_message
from deployments.config import ServeConfig

COMMAND = (sys.executable, "-m", "deployments.cli.main")
READY_WITHIN_S = 600.0
STOPPED_WITHIN_S = 60.0
POLL_S = 0.5
"""Interval of health checks while it starts: each takes it some 20 ms of CPU."""
GONE_WITHIN_S, LOOK_EVERY_S, SETTLED_S = 120.0, 0.2, 3.0
"""Time for a gang without work to end, its processes to be looked at, and Serve to forget it."""
REST_CORES, REST_LOOKS, LOOK_S = 0.5, 3, 1.0
"""The application is at rest if it uses fewer cores than that in this many samples in a row."""
AT_REST_WITHIN_S = 120.0
LOGS = "tr_*/r/session_2*/logs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """A running ``troupe serve``."""

    url: str
    ready_s: float
    """Time from the command to the first 200 of ``GET /health``."""
    process: psutil.Process
    logs: Path
    """Folder of the Ray session's logs."""
    data_dir: Path
    """TROUPE_DATA_DIR."""

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def memory(self) -> Memory:
        return Memory.of(self.processes())

    def cpu_share(self, over_s: float) -> float:
        """Return the number of cores that all processes use during ``over_s``."""
        before = cpu_s(self.processes())
        time.sleep(over_s)
        return (cpu_s(self.processes()) - before) / over_s

    def rest(self) -> None:
        """Wait until it is at rest. Print a line if it never is."""
        num_looks, end_s = 0, time.monotonic() + AT_REST_WITHIN_S
        while num_looks < REST_LOOKS:
            cores = self.cpu_share(LOOK_S)
            num_looks = num_looks + 1 if cores < REST_CORES else 0
            if time.monotonic() > end_s:
                said = f"not at rest within {AT_REST_WITHIN_S:g} s of its start: {cores:.1f} cores are in use"
                print(said, file=sys.stderr, flush=True)
                return


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Sum of the PSS of all processes. PSS counts a page that n processes share as 1/n in each."""

    pss_bytes: int
    num_processes: int

    @classmethod
    def of(cls, processes: Sequence[psutil.Process]) -> Memory:
        sizes = [size for process in processes if (size := pss_bytes(process))]
        return cls(pss_bytes=sum(sizes), num_processes=len(sizes))


def pss_bytes(process: psutil.Process) -> int:
    """Return ``Pss`` of /proc/PID/smaps_rollup; 0 for a process that is gone or a zombie."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@contextmanager
def serving(
    config: ServeConfig,
    data_dir: Path | None = None,
    keys: Sequence[str] = (),
    ready_within_s: float = READY_WITHIN_S,
    keep_logs_in: Path | None = None,
) -> Iterator[Application]:
    """Run ``troupe serve`` with ``config``. Yield it when it is ready, and end it with all its processes by SIGTERM.

    It also ends if this program gets a SIGTERM (background jobs get no Ctrl-C). Its measurements and decisions stay in
    ``data_dir``, or are lost without one. With ``keys`` it asks for API keys. An error has a note with the message of
    a process that had no memory left. TimeoutError if it is not ready in time. Its logs are copied to ``keep_logs_in``
    before its end, also those of a start that failed.
    """
    files = tempfile.TemporaryDirectory(prefix="troupe_bench_", dir="/tmp", ignore_cleanup_errors=True)
    with _exit_on_sigterm(), files as name:
        folder, port = Path(name), free_port("127.0.0.1")
        data_dir = folder if data_dir is None else data_dir.resolve()
        file = folder / "config.yaml"
        file.write_text(json.dumps(config.model_dump(mode="json")))  # JSON is YAML
        started_s = time.perf_counter()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*COMMAND, "serve", str(file), "--port", str(port)],
                env=os.environ | {"TROUPE_DATA_DIR": str(data_dir), "RAY_TMPDIR": name} | key_variables(keys),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process, folder / "log", ready_within_s)
            ready_s = time.perf_counter() - started_s
            (session,) = folder.glob("tr_*/r/session_2*")
            server = psutil.Process(process.pid)
            yield Application(url=url, ready_s=ready_s, process=server, logs=session / "logs", data_dir=data_dir)
        except BaseException as error:
            lines = errors(folder / "log", folder.glob(f"{LOGS}/**/*.err"))
            print(*lines, sep="\n", file=sys.stderr, flush=True)
            if said := out_of_memory(folder):
                error.add_note(said)
            raise
        finally:
            copy_logs(folder, keep_logs_in)
            end(process)


def copy_logs(folder: Path, target: Path | None) -> None:
    """Copy the logs of the application with files in ``folder`` to ``target``, if one is given."""
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "log", target / "server.log")
    for logs in folder.glob(LOGS):  # files may go while they are copied
        with suppress(shutil.Error):
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM. After ``STOPPED_WITHIN_S``, kill all its processes and raise TimeoutExpired."""
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(process.pid)
        all_processes = [server, *server.children(recursive=True)]
        process.terminate()
        try:
            process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            for one in all_processes:  # what is left would hold memory of GPUs
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            raise


def await_gang_end(pids: Sequence[int]) -> None:
    """Wait until the gang with the ranks ``pids`` has scaled to zero. TimeoutError if it does not."""
    if not wait_until(lambda: not any(map(psutil.pid_exists, pids)), GONE_WITHIN_S, LOOK_EVERY_S):
        raise TimeoutError(f"the gang did not end within {GONE_WITHIN_S:g} s: denoiser.autoscaling says when")
    time.sleep(SETTLED_S)


def wait_until(holds: Callable[[], bool], within_s: float, every_s: float) -> bool:
    """Ask ``holds`` every ``every_s`` until it is true. Return False if it is not within ``within_s``."""
    end_s = time.monotonic() + within_s
    while not (is_true := holds()) and time.monotonic() < end_s:
        time.sleep(every_s)
    return is_true


def out_of_memory(folder: Path) -> str:
    """Return the message of the first process, by name of its log, that had no memory left; empty if none had."""
    for file in (folder / "log", *sorted(folder.glob(f"{LOGS}/**/*.err"))):
        with suppress(FileNotFoundError):
            if said := memory_message(file.read_text(errors="replace")):
                return said
    return ""


def key_variables(keys: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that name API keys. Without keys this program's own variables remain."""
    return {"TROUPE_API_KEYS": ",".join(keys)} if keys else {}


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def errors(log: Path, files: Iterable[Path]) -> Iterator[str]:
    """Yield the end of the server's output in ``log``, and the errors that its processes logged in ``files``."""
    yield log.read_text(errors="replace")[-4000:]
    for file in files:
        with suppress(FileNotFoundError):
            lines = file.read_text(errors="replace").splitlines()
            yield from (line[:4000] for line in lines if '"level": "error"' in line or "Traceback" in line)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    with http_client(url, base_url=url, timeout=5.0) as client:
        while time.monotonic() < end_s:
            if process.poll() is not None:
                raise RuntimeError(f"troupe serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
            with suppress(httpx.TransportError):
                if client.get("/health").status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
    raise TimeoutError(f"not ready within {within_s:g} s:\n{log.read_text()[-4000:]}")


def free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that have files in ``folder`` open."""

    def is_in(process: psutil.Process) -> bool:
        try:
            return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_in(process)]


def kill_all_in(folder: Path) -> None:
    """Send SIGKILL to the processes that have files in ``folder`` open, until there is none."""
    while left := processes_in(folder):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
