"""What blocks and is refused in an event loop runs beside one, and where it is without one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.cli.serving import outside_loops


def refuse_in_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
    threads.append(threading.current_thread())


threads: list[threading.Thread] = []


async def test_in_a_loop_it_runs_beside_it() -> None:
    outside_loops(refuse_in_a_loop)
    assert threads.pop() is not threading.current_thread()


def test_without_a_loop_it_runs_here() -> None:
    outside_loops(refuse_in_a_loop)
    assert threads.pop() is threading.current_thread()
