"""The zygote's loop, with a worker and a shim of the test."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from selectors import EVENT_READ

import pytest

from deployments import zygote as zygote_module
from deployments.zygote import Zygote


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    """Return a zygote that ends with its last worker."""
    monkeypatch.setattr(zygote_module, "IDLE_S", 0.0)
    handler, wakeup = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    listener, other = socket.socketpair()
    with listener, other:
        yield Zygote(listener, None, {})
    signal.signal(signal.SIGCHLD, handler)
    signal.set_wakeup_fd(wakeup)


def test_a_worker_and_its_shim_that_end_together_end_no_zygote(zygote: Zygote) -> None:
    """A zygote that is busy hears of both at once."""
    connection, shim = socket.socketpair()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", ""], os.environ)
    zygote._workers[pid] = connection
    zygote._selector.register(connection, EVENT_READ, zygote._lose_shim)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    shim.close()
    assert zygote.run() is None
    assert connection.fileno() == -1
