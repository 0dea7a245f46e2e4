"""Blocking work runs in a thread without an event loop, with a limit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.cli.cluster import Limited
from tests.support.patience import PATIENCE_S


async def test_work_has_no_event_loop() -> None:
    found: list[threading.Thread] = []

    def refuse_in_a_loop() -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        found.append(threading.current_thread())

    assert Limited(refuse_in_a_loop).ends_within(PATIENCE_S)
    assert found != [threading.current_thread()]


def test_work_that_does_not_end_is_left() -> None:
    may_end = threading.Event()
    work = Limited(lambda: may_end.wait(PATIENCE_S))
    assert not work.ends_within(0.0)
    may_end.set()
    assert work.ends_within(PATIENCE_S)
