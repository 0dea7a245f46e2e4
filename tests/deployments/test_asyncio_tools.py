"""Streams run side by side: their order, their failures, and no leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from anyio import create_task_group

from deployments.asyncio_tools import (
    EndedError,
    IdleError,
    OneThread,
    Upcoming,
    finish,
    merge,
    produced,
    taken,
    unless,
)
from tests.support.patience import PATIENCE_S


class Source:
    """Yields each number of ``gates`` once its gate is open. ``is_closed`` is set at any end.

    ``has_begun`` is set once it waits for its first gate: a source that never began is never closed either.
    """

    def __init__(self, *numbers: int, failure: BaseException | None = None) -> None:
        self.gates = {number: asyncio.Event() for number in numbers}
        self.failure = failure
        self.is_closed = False
        self.has_begun = asyncio.Event()

    async def run(self) -> AsyncGenerator[int]:
        try:
            self.has_begun.set()
            for number, gate in self.gates.items():
                await gate.wait()
                yield number
            if self.failure is not None:
                raise self.failure
        finally:
            await asyncio.sleep(0)  # an end that takes time
            self.is_closed = True

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()


async def test_items_come_as_they_are_ready() -> None:
    one, other = Source(1, 2), Source(11, 12)
    async with aclosing(merge(one.run(), other.run())) as items:
        order = (11, 1, 2, 12)
        for number in order:
            (one if number < 10 else other).gates[number].set()
            assert await anext(items) == (number > 10, number)
        assert [item async for item in items] == []
    assert one.is_closed
    assert other.is_closed


@pytest.mark.parametrize("failure", [OSError("away"), asyncio.CancelledError("away")], ids=["error", "cancellation"])
async def test_the_first_failure_closes_the_others(failure: BaseException) -> None:
    waiting, failing = Source(1), Source(failure=failure)
    with pytest.raises(type(failure), match="away"):
        await anext(merge(waiting.run(), failing.run()))
    assert waiting.is_closed


async def test_leaving_closes_all() -> None:
    waiting, ready = Source(1), Source(11, 12)
    ready.gates[11].set()
    async with aclosing(merge(waiting.run(), ready.run())) as items:
        assert await anext(items) == (1, 11)
    assert waiting.is_closed
    assert ready.is_closed


@pytest.mark.parametrize("by_group", [False, True], ids=["once", "until it is over"])
async def test_a_cancelled_consumer_closes_all(by_group: bool) -> None:
    sources = [Source(1), Source(2)]

    async def consume() -> None:
        async with aclosing(merge(*(source.run() for source in sources))) as items:
            await anext(items)

    if by_group:
        async with create_task_group() as group:
            group.start_soon(consume)
            await asyncio.gather(*(source.has_begun.wait() for source in sources))
            group.cancel_scope.cancel()
    else:
        task = asyncio.create_task(consume())
        await asyncio.gather(*(source.has_begun.wait() for source in sources))
        task.cancel()
        await asyncio.wait((task,))
    assert all(source.is_closed for source in sources)


async def test_silence_is_told_and_nothing_is_lost() -> None:
    source = Source(1, 2)
    async with aclosing(Upcoming(source.run())) as items:
        for wait_s in (0.0, 0.001):
            with pytest.raises(IdleError):
                await items.next(wait_s)
        source.open()
        assert [await items.next(PATIENCE_S) for _ in range(4)] == [1, 2, None, None]
    assert source.is_closed


async def test_leaving_an_item_that_is_waited_for_closes_its_source() -> None:
    source = Source(1)
    async with aclosing(Upcoming(source.run())) as items:
        with pytest.raises(IdleError):
            await items.next(0.0)
        await asyncio.sleep(0)
    assert source.is_closed


async def test_a_producer_fails_after_its_items_and_does_not_wait() -> None:
    put: list[int] = []

    async def produce(publish: Callable[[int], None]) -> None:
        for number in (1, 2):
            publish(number)
            put.append(number)
        raise OSError("away")

    items = produced(produce)
    assert await anext(items) == 1
    assert put == [1, 2]
    assert await anext(items) == 2
    with pytest.raises(OSError, match="away"):
        await anext(items)


async def test_a_producer_ends_with_its_consumer() -> None:
    is_over = False

    async def produce(publish: Callable[[int], None]) -> None:
        nonlocal is_over
        publish(1)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an end that takes time
            is_over = True

    async with aclosing(produced(produce)) as items:
        assert await anext(items) == 1
    assert is_over


async def test_work_ends_with_what_it_depends_on() -> None:
    source = Source(1)

    async def use() -> None:
        async with aclosing(source.run()) as items:
            await anext(items)

    async def end() -> None:
        await source.has_begun.wait()

    with pytest.raises(EndedError):
        await unless(use(), end())
    assert source.is_closed


async def test_what_work_depends_on_is_let_go_when_it_fails() -> None:
    source = Source(1)

    async def watch() -> None:
        async with aclosing(source.run()) as items:
            await anext(items)

    async def fail() -> None:
        await source.has_begun.wait()
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await unless(fail(), watch())
    assert source.is_closed


async def test_one_thread_waits_for_a_call_that_blocks_and_the_next_call_is_a_new_one() -> None:
    may_answer, calls = threading.Event(), list[int]()

    def call() -> int:
        calls.append(len(calls))
        assert may_answer.wait(PATIENCE_S)
        return calls[-1]

    controller = OneThread(call)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await controller.answer(0.01)
    may_answer.set()
    assert await asyncio.gather(*(controller.answer(PATIENCE_S) for _ in range(3))) == [0, 0, 0]
    assert await controller.answer(PATIENCE_S) == 1


async def nothing(found: object) -> None:
    """Return nothing."""


@pytest.mark.parametrize("run", [finish, lambda work: taken(work, nothing)], ids=["finish", "taken"])
async def test_a_cancelled_call_whose_work_fails_is_cancelled(
    run: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
) -> None:
    """Otherwise a loop that survives the work's errors goes on, and the wait for its end never returns."""
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        begun.set()
        await may_fail.wait()
        raise OSError("the work failed")

    task = asyncio.create_task(run(fail()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)
