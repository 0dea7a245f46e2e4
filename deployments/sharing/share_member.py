"""A deployment of a model that shares GPUs: it reports its work, and sleeps and wakes on command."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError, RayError

from deployments.asyncio_tools import cancel
from deployments.sharing.share_actor import ShareSpec, share_actor
from engines.core.resources import MemoryUse
from engines.gang.arbiter import Demand
from engines.gang.share_group import ShareOrder, ShareReport

LOOK_S = 0.25
"""Interval at which the work is looked at, unless it is known to have changed."""
RETRY_S = 0.5
ALIVE_S = 2.0
"""Interval of reports while the weights move, far below ``SILENT_S``: a sleep waits for the steps in flight."""
CHANGE = 0.25
"""Relative change of the backlog that is reported at once."""

Move = Callable[[bool], Awaitable[Sequence[MemoryUse]]]
"""``move(asleep)`` brings the weights to the host, or back, and returns the memory in use."""

logger = logging.getLogger("troupe.sharing")


class ShareMember:
    """Runs in an event loop. ``move`` and ``demand`` are the deployment's own."""

    def __init__(self, spec: ShareSpec, model: str, stage: str, *, move: Move, demand: Callable[[], Demand]) -> None:
        self._spec, self._move, self._demand = spec, move, demand
        self._actor = share_actor(spec)
        self._report = ShareReport(model=model, stage=stage, token=secrets.token_hex(8), state="waiting")
        self._swaps_s = {False: 0.0, True: 0.0}
        """Duration of the last wake-up and the last sleep."""
        self._task: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self.on_wake_s: Callable[[float], object] = lambda wake_s: None
        """Called with the predicted seconds until the model is awake, after each answer of the arbiter."""

    def look(self) -> None:
        """Look at the work now. Call it in the event loop when new work comes."""
        self._has_news.set()

    async def bundles(self) -> Any:
        """Return the placement group of the gangs."""
        return await self._actor.bundles.remote()

    async def may_load(self) -> None:
        """Wait for the turn to load weights: other models are asleep then."""
        while (await self._exchange()).state != "loading":
            pass
        self._report = replace(self._report, state="loading")
        self._task = asyncio.create_task(self._keep_loading())

    async def grant(self, uses: Sequence[MemoryUse]) -> tuple[int, ...] | None:
        """Return the host memory that each process may take for its weights so far. None is no limit.

        An arbiter of an earlier version knows no such call: all memory is granted by ``loaded`` then.
        """
        sizes = [use.weights for use in uses]
        try:
            pinned: tuple[int, ...] | None = await self._actor.grant.remote(self._report.token, sizes)
        except (RayError, AttributeError) as error:
            logger.warning("no host memory is prepared: the arbiter of shared GPUs grants none: %s", error)
            return (0,) * len(sizes)
        self._report = replace(self._report, pinned=pinned)
        return pinned

    async def loaded(self, uses: Sequence[MemoryUse]) -> tuple[int, ...] | None:
        """Report the memory in use and begin to follow orders. Return the host memory that each process may pin.

        None is no limit. ValueError if the model cannot share its devices.
        """
        if self._task is not None:
            await cancel(self._task)
        self._report = replace(self._report, state="awake", uses=tuple(uses), demand=self._demand(), pinned=None)
        order = await self._exchange()
        self._report = replace(self._report, pinned=order.pinned)
        self._task = asyncio.create_task(self._follow())
        return order.pinned

    async def close(self) -> None:
        """Leave the group: this process ends."""
        if self._task is not None:
            await cancel(self._task)
        with suppress(RayActorError):
            await self._actor.leave.remote(self._report.token)

    def check(self) -> None:
        """Raise why orders are not followed any more, if so. For health checks."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _keep_loading(self) -> None:
        while True:
            await self._exchange()

    async def _follow(self) -> None:
        while True:
            order = await self._exchange_until_changed()
            if order is not None and order.state in ("awake", "asleep") and order.state != self._report.state:
                await self._reach(asleep=order.state == "asleep")

    async def _reach(self, *, asleep: bool) -> None:
        begun_s, reporting = time.monotonic(), asyncio.create_task(self._keep_reporting())
        try:
            uses = await self._move(asleep)
        finally:
            await cancel(reporting)
        self._swaps_s[asleep] = time.monotonic() - begun_s
        swap_s = sum(self._swaps_s.values()) if all(self._swaps_s.values()) else None
        state: Any = "asleep" if asleep else "awake"
        self._report = replace(self._report, state=state, uses=tuple(uses), demand=self._demand(), swap_s=swap_s)

    async def _keep_reporting(self) -> None:
        """Repeat the last report. A silent member counts as gone, and another model would take its memory."""
        while True:
            await asyncio.sleep(ALIVE_S)
            await self._exchange()

    async def _exchange_until_changed(self) -> ShareOrder | None:
        """Return the next order; None once the work has changed, which a new report then says."""
        exchanging, news = asyncio.ensure_future(self._exchange()), asyncio.ensure_future(self._has_news.wait())
        try:
            while True:
                await asyncio.wait((exchanging, news), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if exchanging.done():
                    return exchanging.result()
                if news.done():
                    self._has_news.clear()
                    news = asyncio.ensure_future(self._has_news.wait())
                demand = self._demand()
                if _differs(demand, self._report.demand):
                    self._report = replace(self._report, demand=demand)
                    return None
        finally:
            await cancel(exchanging, news)

    async def _exchange(self) -> ShareOrder:
        """Return the actor's answer. If it dies, its successor is asked."""
        while True:
            try:
                order: ShareOrder = await self._actor.exchange.remote(replace(self._report))
                self.on_wake_s(order.wake_s)
                return order
            except RayActorError as error:
                logger.warning("the arbiter of shared GPUs does not answer: %s", error)
                await asyncio.sleep(RETRY_S)
                self._actor = share_actor(self._spec)


def _differs(demand: Demand, reported: Demand) -> bool:
    if (demand.backlog_s > 0) != (reported.backlog_s > 0) or (demand.slack_s is None) != (reported.slack_s is None):
        return True
    changes_s = [abs(demand.backlog_s - reported.backlog_s), abs((demand.ending_s or 0.0) - (reported.ending_s or 0.0))]
    return max(changes_s) > max(LOOK_S, CHANGE * reported.backlog_s)


class AwakeGate:
    """Work of threads that needs the weights: it waits while they are asleep, and they wait for it to end.

    ``sleep`` and ``wake`` move the weights.
    """

    def __init__(self, sleep: Callable[[], object], wake: Callable[[], object]) -> None:
        self._moves = {True: sleep, False: wake}
        self._condition = threading.Condition()
        self._num_working = self._num_open = 0
        self._is_open = True
        self._work_s = 0.1
        """Duration of the last work."""
        self.on_work: Callable[[], object] = lambda: None
        """Called when new work comes, on its thread."""

    @contextmanager
    def work(self) -> Iterator[None]:
        """Wait until the weights are awake; they do not go to sleep inside the block."""
        with self._condition:
            self._num_open += 1
        self.on_work()
        with self._condition:
            try:
                self._condition.wait_for(lambda: self._is_open)
            except BaseException:
                self._num_open -= 1
                raise
            self._num_working += 1
        begun_s = time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                self._num_open -= 1
                self._num_working -= 1
                self._work_s = time.monotonic() - begun_s
                self._condition.notify_all()

    def move(self, asleep: bool) -> None:
        """Move the weights: to the host once no work is under way."""
        with self._condition:
            if asleep:
                self._is_open = False
                self._condition.wait_for(lambda: not self._num_working)
            self._moves[asleep]()
            self._is_open = not asleep
            self._condition.notify_all()

    def demand(self) -> Demand:
        """Return the open work, by the duration of the last one."""
        with self._condition:
            return Demand(backlog_s=self._num_open * self._work_s)


class ThreadMember:
    """A ``ShareMember`` in a thread of its own, for a deployment without an event loop.

    ``use`` returns the memory in use, ``reserve`` takes the host memory that may be pinned.
    """

    def __init__(
        self,
        spec: ShareSpec,
        model: str,
        stage: str,
        gate: AwakeGate,
        use: Callable[[], MemoryUse],
        reserve: Callable[[int | None], None],
    ) -> None:
        self._gate, self._use, self._reserve = gate, use, reserve
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="sharing").start()
        self._member = ShareMember(spec, model, stage, move=self._move, demand=gate.demand)
        gate.on_work = lambda: self._loop.call_soon_threadsafe(self._member.look)

    def may_load(self) -> None:
        """See ``ShareMember``."""
        asyncio.run_coroutine_threadsafe(self._member.may_load(), self._loop).result()

    def granted(self) -> int | None:
        """Return the host memory that the weights so far may take. None is no limit."""
        pinned = asyncio.run_coroutine_threadsafe(self._member.grant([self._use()]), self._loop).result()
        return None if pinned is None else pinned[0]

    def loaded(self) -> None:
        """Report the memory, and follow orders from now on."""
        pinned = asyncio.run_coroutine_threadsafe(self._member.loaded([self._use()]), self._loop).result()
        self._reserve(None if pinned is None else pinned[0])

    def close(self) -> None:
        """Leave the group, if that takes no longer than a second."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._member.close(), self._loop).result(1.0)

    def check(self) -> None:
        """Raise what ended the thread's work, for health checks."""
        self._member.check()

    async def _move(self, asleep: bool) -> Sequence[MemoryUse]:
        await asyncio.to_thread(self._gate.move, asleep)
        return [await asyncio.to_thread(self._use)]
