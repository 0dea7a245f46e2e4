"""An event loop whose time passes only while all tasks wait, and ranks that work like those with GPUs."""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, TypeVar

from ray.exceptions import ActorDiedError

from engines.core.spec import tiling_sizes
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.step_plan import JobStep, StepPlan, StepReport
from engines.gang.jobs.step_timer import CudaStepTimer
from tests.engines.gang.support.set_clock import actor, remote

T = TypeVar("T")

LOOK_S = 2e-4
"""The clock advances by up to this much with every look at it."""
EARLY_S = 1e-3
"""Timers of uvloop, which Ray Serve runs on, count whole milliseconds: some end early."""
THREADS_S = 5.0
"""Real time in which a thread that a task waits for will have done its work."""
ROUNDING_S = 1e-9
"""Sums of times may differ by this much."""
CALL_S, LAUNCH_S, MOVE_S = 0.0005, 0.002, 0.0012
"""Times of a call between processes, of a step's launch on a rank, and of moving a job's state."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Raises RuntimeError if all tasks wait and none waits for a time: they would wait for ever."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if ready := super().select(THREADS_S if timeout is None else 0):
            return ready
        if timeout is None:
            raise RuntimeError("all tasks wait, and nothing will ever come")
        self._loop.now_s += timeout
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock(Clock):
    def __init__(self) -> None:
        self._loop: Any = asyncio.get_running_loop()
        self._random = Random(0)

    def now_s(self) -> float:
        self._loop.now_s += self._random.uniform(0.0, LOOK_S)
        return float(self._loop.now_s)

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        return asyncio.timeout(None if delay_s is None else max(0.0, delay_s - EARLY_S))


class VirtualMark:
    """Stands for ``torch.cuda.Event`` on a device that has done its work at ``ends_s[rank]``."""

    def __init__(self, ends_s: list[float], rank: int) -> None:
        self._ends_s, self._rank, self._at_s = ends_s, rank, 0.0
        self._loop = asyncio.get_running_loop()

    def record(self) -> None:
        self._at_s = max(self._loop.time(), self._ends_s[self._rank])

    def query(self) -> bool:
        return self._at_s <= self._loop.time() + ROUNDING_S

    def synchronize(self) -> None:
        raise AssertionError("a task must await in virtual time")

    def elapsed_time(self, end: VirtualMark, /) -> float:
        return 1e3 * (end._at_s - self._at_s)


class GpuRanks:
    """Actors of ranks. A step takes ``steps[its shape][size of its team]`` seconds on the devices of a team. It begins
    when all devices have it and have done their earlier work. A rank reports a step when the one before it has ended; a
    step with latents when it has ended itself. The reported times are those of ``CudaStepTimer`` on marks of its
    device. ``shapes`` has the shape of each job, or a function of the step. ``plans`` are the plans sent, to dead ranks
    as well, each once. ``rank_s`` adds up device time by job, over all of a team. ``launch_s`` is the time of a step's
    calls, while the device is in the step already."""

    def __init__(
        self,
        num_ranks: int,
        steps: Mapping[Any, Mapping[int, float]],
        shapes: Mapping[str, Any],
        *,
        launch_s: float = LAUNCH_S,
    ) -> None:
        self._steps, self._shapes, self._launch_s = steps, shapes, launch_s
        self._plans: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(num_ranks)]
        self._meetings: dict[Any, tuple[asyncio.Future[float], list[int]]] = {}
        self._device_ends_s = [0.0] * num_ranks
        self.rank_s: defaultdict[str, float] = defaultdict(float)
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.ensure_future(self._work(rank)) for rank in range(num_ranks)]
        self._is_dead = [False] * num_ranks
        self._asked: list[list[asyncio.Future[Any]]] = [[self._loop.create_future()] for _ in range(num_ranks)]
        """The open calls of each rank; the first future says whether it lives."""
        self.plans: dict[int, StepPlan] = {}
        self.actors = [self._actor(rank) for rank in range(num_ranks)]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def die(self, rank: int) -> None:
        """End its process: its open calls fail, and its peers wait for it in their exchanges."""
        self._is_dead[rank] = True
        self._tasks[rank].cancel()
        for future in self._asked[rank]:
            _fail(future)

    def _actor(self, rank: int) -> Any:
        made = actor(partial(self._send, rank), partial(self._answer, rank))
        made.watch = remote(lambda: self._asked[rank][0])
        return made

    def _answer(self, rank: int) -> asyncio.Future[None]:
        future = self._question(rank)
        self._loop.call_later(2 * CALL_S, _settle, future, None)
        return future

    def _send(self, rank: int, plan: StepPlan, num_returns: int) -> Any:
        self.plans[plan.sequence] = plan
        refs = [self._question(rank) for _ in range(num_returns)]
        self._loop.call_later(CALL_S, self._plans[rank].put_nowait, (plan, refs))
        return refs if num_returns > 1 else refs[0]

    def _question(self, rank: int) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._asked[rank] = [*self._asked[rank][:1], *(one for one in self._asked[rank][1:] if not one.done()), future]
        if self._is_dead[rank]:
            _fail(future)
        return future

    async def _work(self, rank: int) -> None:
        before_s, pace = 0.0, CudaStepTimer(partial(VirtualMark, self._device_ends_s, rank), self._loop.time)
        while True:
            plan, (report, *latents) = await self._plans[rank].get()
            if plan.drops or plan.moves:
                await self._until(before_s)
            move_ms = await self._make(plan)
            work = plan.work_of(rank)
            if work is not None:
                pace.begin(plan.sequence)
                ends_s = await self._device_end_s(plan.sequence, work.ranks, work.job_steps[0])
                await asyncio.sleep(self._launch_s)
                pace.end()
                await self._until(ends_s if latents else before_s)
                before_s = ends_s
            times = {"running_ms": pace.running_ms(), "ended_ms": pace.ended_ms(), "move_ms": move_ms}
            predicted = work is not None
            done = StepReport(rank=rank, sequence=plan.sequence, predicted=predicted, **times)  # type: ignore[arg-type]
            self._loop.call_later(CALL_S, _settle, report, done)
            for each, job_step in zip(latents, plan.emits_of(rank), strict=True):
                self._loop.call_later(CALL_S, _settle, each, job_step)

    async def _make(self, plan: StepPlan) -> float:
        """Return the milliseconds that each move takes the rank, which waits for the others."""
        if not plan.moves:
            return 0.0
        started_s = self._loop.time()
        await self._until(await self._met(("moves", plan.sequence), len(self._plans), started_s))
        await asyncio.sleep(MOVE_S * len(plan.moves))
        return 1e3 * (self._loop.time() - started_s) / len(plan.moves)

    async def _device_end_s(self, sequence: int, ranks: tuple[int, ...], job_step: JobStep) -> float:
        begin_s = await self._met((sequence, ranks), len(ranks), max(self._device_ends_s[rank] for rank in ranks))
        shape = self._shapes[job_step.job_id]
        step_s = max(self._launch_s, self._steps[shape(job_step.step) if callable(shape) else shape][len(ranks)])
        for rank in ranks:
            self._device_ends_s[rank] = begin_s + step_s
        self.rank_s[job_step.job_id] += step_s  # added once for each rank of the team
        return begin_s + step_s

    async def _met(self, key: Any, num_ranks: int, ready_s: float) -> float:
        """Return, once ``num_ranks`` have come, the latest time at which one of them is ready."""
        met, came = self._meetings.setdefault(key, (self._loop.create_future(), []))
        came.append(0)
        if len(came) == num_ranks:
            del self._meetings[key]
            met.set_result(max(self._loop.time(), ready_s))
        return await met

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._loop.time()))


@asynccontextmanager
async def virtual_gang(
    config: GangConfig, ranks: GpuRanks, *, model: str, step_times: StepTimes | None = None
) -> AsyncIterator[Gang]:
    """Start a gang of these ranks, in teams of all sizes that tile it."""
    gang = Gang(
        config,
        ranks.actors,
        infos=(),
        team_sizes=tiling_sizes(config.num_ranks),
        model=model,
        clock=VirtualClock(),
        step_times=step_times,
    )
    try:
        yield gang
    finally:
        await gang.close()
        ranks.close()


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Set the answer unless the rank has died or the caller no longer waits."""
    if not future.done():
        future.set_result(answer)


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(ActorDiedError())
        future.exception()  # marks the exception as retrieved
