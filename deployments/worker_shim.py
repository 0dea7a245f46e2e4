"""Start a Ray worker as a fork of the node's zygote, in place of ``python`` and of Ray's set-up of a worker.

The shim requests a fork from the zygote (``deployments/zygote.py``), forwards signals to it, and exits with its status.
Without a zygote for this worker, it executes Python itself and logs why.

A runtime environment with it as ``py_executable`` runs ``worker_shim.py LEVEL SCRIPT ARGUMENTS…``. In place of Ray's
``setup_worker.py``, which imports all of Ray, it runs as
``worker_shim.py SCRIPT ARGUMENTS… --serialized-runtime-env-context=JSON``.

``RAY_RAYLET_PID=PID worker_shim.py --warm`` starts the zygotes of a node ahead of its first worker, which then waits
for no imports. Without the variable it waits for the user's only raylet, as in a pod.

It imports little, and of the standard library only: it runs once per worker.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
BASE, MODEL = LEVELS = ("base", "model")
WARM = "--warm"
DIRECTORY_VARIABLE, RAYLET_VARIABLE = "TROUPE_ZYGOTES", "RAY_RAYLET_PID"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
LENGTH = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")
START_WITHIN_S = 20.0
ANSWER_WITHIN_S = 45.0
"""Includes imports of libraries. Ray waits a minute for a worker."""
WATCHED_EVERY_S, STOPPED_FOR_S = 0.25, 1.0
"""A process that stays stopped answers nothing. One that ran between two looks does not count: tools that limit a
process's CPU time stop and continue it several times a second."""
IDLE_FOR_S, BUSY_FOR_S = 8.0, 20.0
"""A starting Ray worker hangs if it uses no CPU time for ``IDLE_FOR_S``, or ``BUSY_FOR_S`` altogether: it takes two.
Ray itself would wait a minute for it, and hold its resources."""
STOPPED, TRACED = "T", "t"
"""States of a process in ``/proc``: by a signal, by a debugger."""
MAX_REPLACED = 2
RAY_WORKER, RAY_TITLE = "default_worker.py", b"ray::"
"""Its script, and how its title begins when it has connected."""
FOLDER = "/tmp"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class UnavailableError(Exception):
    """No zygote can fork this worker; the message says why."""


def main() -> None:
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the project's modules are no libraries
    command = sys.argv[1:]
    if command == [WARM]:
        warm()
        return
    if command[0] in LEVELS:
        run(command[0], command[1:], fallback=[sys.executable, *command[1:]])
    set_up(command)


def warm() -> None:
    """Start the zygotes of the raylet whose process id is in the environment, which imports in the background.

    They have the variables that the raylet gives its workers. Nothing is started where ``TROUPE_ZYGOTES`` names others.
    """
    raylet = os.environ[RAYLET_VARIABLE] if RAYLET_VARIABLE in os.environ else awaited_raylet()
    try:
        with open(f"/proc/{int(raylet)}/environ", "rb") as file:
            variables = dict(one.split(b"=", 1) for one in file.read().split(b"\0") if b"=" in one)
    except (OSError, ValueError):
        sys.exit(f"worker_shim: {RAYLET_VARIABLE} is {raylet!r}; set it to the process id of a raylet of this user")
    if variables.get(b"RAY_LD_PRELOAD_ON_WORKERS", b"0") == b"0":
        variables.pop(b"LD_PRELOAD", None)  # Ray's allocator for the raylet
    os.environb.clear()
    os.environb.update({**variables, os.fsencode(RAYLET_VARIABLE): os.fsencode(raylet)})
    directory = zygote_directory()
    for level in LEVELS:
        connect(directory, level).close()


def awaited_raylet() -> str:
    """Return the process id of this user's raylet; "" if there are several, or none within ``START_WITHIN_S``."""
    import time

    end_s = time.monotonic() + START_WITHIN_S
    while not (found := [name for name in os.listdir("/proc") if name.isdigit() and is_own_raylet(name)]):
        if time.monotonic() > end_s:
            return ""
        time.sleep(0.1)
    return found[0] if len(found) == 1 else ""


def is_own_raylet(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read() == "raylet\n" and os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:  # the process has ended
        return False


def set_up(command: list[str]) -> None:
    """Set up and run the worker, as Ray's ``setup_worker.py`` does for workers without containers."""
    script, context, rest = command[0], {}, []
    for part in command[1:]:
        if part.startswith(CONTEXT):
            context = json.loads(part.removeprefix(CONTEXT) or "{}")
        elif part != f"{LANGUAGE}PYTHON":
            rest.append(part)
    original = [sys.executable, os.path.join(os.path.dirname(script), "setup_worker.py"), *command]
    level = level_of(context.get("py_executable") or "")
    if level is None or context.get("command_prefix") or context.get("override_worker_entrypoint"):
        os.execv(sys.executable, original)
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    run(level, [script, *rest], fallback=[sys.executable, script, *rest])


def level_of(executable: str) -> str | None:
    """Return the level of ``executable``; None if it is neither this interpreter nor this shim."""
    if executable in ("", sys.executable):
        return BASE
    *_, program, level = ["", *executable.split()]
    return level if program.strip("'\"") == os.path.abspath(__file__) and level in LEVELS else None


def run(level: str, command: list[str], fallback: list[str]) -> None:
    """Run ``command`` in a fork and exit with its status, or execute ``fallback``. Never return."""
    directory, num_left = zygote_directory(), MAX_REPLACED
    while True:
        try:
            connection = connect(directory, level)
            pid = request_fork(connection, command)
        except (UnavailableError, OSError) as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            say_once(directory, f"a worker is started without a fork ({level}): {error}")
            os.execv(sys.executable, fallback)
        is_watched = num_left > 0 and os.path.basename(command[0]) == RAY_WORKER
        status = supervise(connection, pid, is_watched)
        if status is not None:
            end_like(status)
        print(f"worker_shim: process {pid} hung at its start and is replaced", file=sys.stderr, flush=True)
        num_left -= 1


def zygote_directory() -> str:
    """Return the folder of this node's sockets: that of the environment, or one named after the raylet."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return given or node_folder(os.environ.get(RAYLET_VARIABLE, str(os.getppid())))


def node_folder(raylet: str) -> str:
    """Return the folder of a raylet, short, since the path of a socket has at most 107 bytes."""
    import zlib

    return os.path.join(FOLDER, f"troupe_{os.getuid()}_{raylet}_{zlib.crc32(ROOT.encode()):08x}")


def connect(directory: str, level: str) -> socket.socket:
    """Return a connection to the zygote of ``level``, started if needed. UnavailableError if there is none."""
    path = os.path.join(directory, level)
    connection = connection_to(path)
    if connection is None and not os.environ.get(DIRECTORY_VARIABLE):
        connection = start_zygote(directory, level, path)
    if connection is None:
        raise UnavailableError(f"no zygote listens at {path}")
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        raise UnavailableError(f"{path} belongs to user {user}")
    return connection


def connection_to(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def start_zygote(directory: str, level: str, path: str) -> socket.socket | None:
    """Start the node's zygote in a session of its own, unless another worker is doing so, and connect to it."""
    import fcntl
    import subprocess
    import time

    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnavailableError(f"{directory} can be entered by other users")
    with open(os.path.join(directory, f"{level}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connection_to(path)
        if connection is not None:
            return connection
        with open(os.path.join(directory, f"{level}.log"), "ab") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "deployments.zygote", directory, level],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its end needs no wait
        end_s = time.monotonic() + START_WITHIN_S
        while connection is None and time.monotonic() < end_s:
            time.sleep(0.05)
            connection = connection_to(path)
    return connection


def request_fork(connection: socket.socket, command: list[str]) -> int:
    """Return the process id of the fork that runs ``command``. UnavailableError if the zygote refuses."""
    message = json.dumps(
        {
            "command": command,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": own_umask(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": read("/proc/self/oom_score_adj"),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "ignored": [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN],
        }
    ).encode()
    streams = array.array("i", (0, 1, 2))
    connection.settimeout(ANSWER_WITHIN_S)
    connection.sendmsg([LENGTH.pack(len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(message)
    answer = read_message(connection)
    connection.settimeout(None)
    if answer is None or "refusal" in answer:
        raise UnavailableError(answer["refusal"] if answer else "the zygote ended")
    return int(answer["pid"])


def supervise(connection: socket.socket, pid: int, is_starting: bool) -> int | None:
    """Forward signals to ``pid`` until it ends. Return its exit code, or a signal's number, negative.

    None for a worker that hung while ``is_starting``, and was killed.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = None
    if process is not None:
        descriptor = process

        def forward(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, forward)
    hung = wait_for(connection, pid, process, is_starting)
    answer = read_message(connection)
    if hung:
        return None
    if answer is not None:
        return int(answer["status"])
    if process is not None:  # the zygote is dead, and the worker may go on
        wait_for(process, pid, process)
    return 1


def wait_for(end: socket.socket | int, pid: int, process: int | None, is_starting: bool = False) -> bool:
    """Wait until ``end`` can be read. Kill a worker that is stopped for ``STOPPED_FOR_S``, or hangs at its start.

    Health checks find a stopped worker later: they also cover busy ones, so they wait longer. No check of Ray or Serve
    covers a worker that is still starting. Return whether it was killed before it had connected to Ray.
    """
    num_stopped = num_idle = 0
    last_s = 0.0
    is_killed = False
    while not select.select([end], [], [], WATCHED_EVERY_S)[0]:
        state, used_s = state_of(pid)
        is_starting, has_run = is_starting and not has_title(pid), used_s != last_s
        num_stopped = (0 if has_run else num_stopped) + 1 if state == STOPPED else 0
        num_idle = num_idle + 1 if is_starting and not has_run and state != TRACED else 0
        last_s = used_s
        is_stopped = num_stopped * WATCHED_EVERY_S >= STOPPED_FOR_S
        hangs = is_starting and (num_idle * WATCHED_EVERY_S >= IDLE_FOR_S or used_s > BUSY_FOR_S)
        if process is not None and (is_stopped or hangs):
            is_killed = is_killed or is_starting
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
    return is_killed


def state_of(pid: int) -> tuple[str, float]:
    """Return the state of ``pid`` (such as ``STOPPED``) and the CPU seconds that it has used; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def has_title(pid: int) -> bool:
    """Return whether ``pid`` has the title of a worker that has connected to Ray."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(len(RAY_TITLE)) == RAY_TITLE
    except OSError:
        return False


def end_like(status: int) -> None:
    """End this process with an exit code, or by the signal of a negative one. Never return."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def read_message(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    head = read_exactly(connection, LENGTH.size)
    body = head and read_exactly(connection, LENGTH.unpack(head)[0])
    return json.loads(body) if body else None


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return ``num_bytes`` bytes; none if the connection ends before."""
    data = b""
    while len(data) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(data))
        except ConnectionError:
            return b""
        if not part:
            return b""
        data += part
    return data


def own_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def say_once(directory: str, line: str) -> None:
    """Write ``line`` to stderr, once per node."""
    import zlib

    marker = os.path.join(directory, f"said_{zlib.crc32(line.encode()):08x}")
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    except OSError:  # the folder cannot be written
        pass
    print(f"worker_shim: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
