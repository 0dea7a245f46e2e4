"""A gang: rank actors that live and die together, owned by one replica."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ObjectLostError
from ray.util.placement_group import PlacementGroup

from engines.core.engine import Forwards
from engines.core.estimates import StepEstimates
from engines.core.resources import MemoryUse
from engines.gang.arbiter import Demand
from engines.gang.autoscaling import GangReport
from engines.gang.driver import Driver
from engines.gang.errors import GangBrokenError
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang_config import Clock, Environment, GangConfig, LoadRank
from engines.gang.jobs.job import Job, JobDone, JobEvent, JobQueued, Progress
from engines.gang.load import OpenWork
from engines.gang.metrics import STARTS
from engines.gang.placement import current_group
from engines.gang.rank import RankInfo, kill_ranks, spawn_ranks
from engines.gang.start import Grant, Start, rank_environments

logger = logging.getLogger(__name__)

DEATH_WITHIN_S = 5.0
"""Wait for the death of killed ranks."""
ANSWERS_WITHIN_S = 0.1
"""Time that a check still waits after its deadline for answers that have arrived.

Ray blocks the event loop while the caller of an ended stream hangs. Afterwards the answers and the deadline come at
once."""


class Gang:
    """Made by ``Gang.start``. All methods run in the event loop that started it."""

    def __init__(
        self,
        config: GangConfig,
        ranks: Sequence[Any],
        infos: Sequence[RankInfo],
        team_sizes: tuple[int, ...],
        model: str,
        clock: Clock,
        step_times: StepTimes | None = None,
        estimates: StepEstimates | None = None,
        forwards: Forwards | None = None,
    ) -> None:
        self.config = config
        self.infos = tuple(infos)
        self.estimates = estimates
        """Estimated step times, if the ranks have any."""
        self.forwards = forwards
        """Form of the modules' forwards; None if the engine does not report it."""
        self.on_open: Callable[[], object] = lambda: None
        """Called after each new job."""
        self._ranks = ranks
        self._clock = clock
        self._closed = asyncio.Event()
        self._driver = Driver(config, ranks, team_sizes, model, clock, step_times)
        self._driver.start()

    @classmethod
    async def start(
        cls,
        config: GangConfig,
        load: LoadRank,
        *,
        model: str = "unnamed",
        environment: Callable[[], Environment] | None = None,
        python: str = "",
        placement_group: PlacementGroup | None = None,
        gpus: float | None = None,
        step_times: Callable[[Sequence[RankInfo], StepEstimates | None], StepTimes] | None = None,
        clock: Clock | None = None,
        grant: Grant | None = None,
    ) -> Gang:
        """Spawn ranks in the replica's placement group, connect them, run ``load`` on each, then its result.

        ``model`` is the name in logs and metrics. ``environment`` is called on each node and returns the variables of
        its ranks' processes. ``python`` is their command, ``gpus`` their share of a GPU (``spawn_ranks``).
        ``step_times`` returns the step times measured on such ranks, given the ranks' estimates. ``grant`` returns the
        host memory that sleeping weights may take (``Start``).

        On an error, a missed start deadline (``GangBrokenError``) or cancellation, all started ranks are killed.
        Exceptions of ``load`` and of its result are raised here unchanged.
        """
        group, clock = placement_group or current_group(), clock or Clock()
        started_s = clock.now_s()
        environments = await rank_environments(config, group, environment, clock)
        spawn = partial(spawn_ranks, config, group, environments, python, gpus)
        start = Start(config, spawn, clock, model, is_forked=bool(python), grant=grant)
        try:
            infos, built = await start.run(load)
            start_s = clock.now_s() - started_s
            STARTS.labels(model).observe(start_s)
            pids = [info.pid for info in infos]
            logger.info("gang is ready", extra={"model": model, "start_s": round(start_s, 3), "pids": pids})
            measured = step_times(infos, built.estimates) if step_times is not None else None
            said: dict[str, Any] = {"estimates": built.estimates, "forwards": built.forwards}
            return cls(config, start.ranks, infos, built.team_sizes, model, clock, measured, **said)
        except BaseException:
            kill_ranks(start.ranks)
            raise

    @property
    def broken(self) -> GangBrokenError | None:
        """Why the gang takes no more jobs, if so."""
        return self._driver.broken

    @property
    def is_whole(self) -> bool:
        """True if the gang takes jobs."""
        return self.broken is None

    def report(self) -> GangReport:
        """Return the gang's work, for the number of gangs."""
        return self._driver.admission.report()

    def open_work(self) -> dict[str, OpenWork]:
        """Return the open jobs' predicted seconds, for the choice of a gang."""
        return self._driver.admission.open_work()

    def work_s(self, job: Job) -> float | None:
        """Return the predicted seconds of a job on the whole gang; None if that would be a guess."""
        return self._driver.admission.work_s(job)

    async def submit_grouped(self, job: Job, *, every_s: float) -> AsyncGenerator[tuple[JobEvent, ...], None]:
        """Yield the events of a job in groups: ``JobQueued`` first, ``JobDone`` last.

        Steps that end within ``every_s`` of the last group form one group. Closing or cancelling the iterator stops
        the job on all ranks. Raise ``QueueFullError`` and ``ValueError`` before the first event, ``GangBrokenError``
        if the gang breaks, and the errors of the job's own sampler or conditioning.
        """
        open_job, last_group_s = self._driver.open(job), -math.inf
        del job  # with its conditioning: see ``Driver.open``
        self.on_open()
        try:
            while True:
                group = await open_job.next_events(until_s=last_group_s + every_s)
                last_group_s = last_group_s if isinstance(group[0], JobQueued) else self._clock.now_s()
                if events := [e for event in group if not isinstance(event, Exception) if (e := await _fetched(event))]:
                    yield tuple(events)
                if isinstance(group[-1], Exception):
                    raise group[-1]
                if isinstance(group[-1], JobDone):
                    return
        finally:
            self._driver.close(open_job)
            await self._driver.let_go(open_job)

    async def sleep(self) -> tuple[MemoryUse, ...]:
        """Move the weights of all ranks to the host, after the steps in flight. Return each rank's memory use.

        Processes, communicator and captured steps stay. Open jobs continue after ``wake``.
        """
        await self._driver.move(asleep=True)
        return self._driver.rest.uses

    async def wake(self) -> None:
        """Move the weights back to the same addresses, and continue."""
        await self._driver.move(asleep=False)

    def expect_wake(self, wake_s: float) -> None:
        """Take the predicted seconds until ``wake`` ends, for predictions while the weights are on the host."""
        self._driver.rest.expect(wake_s)

    @property
    def wake_s(self) -> float:
        """Predicted seconds until steps may run; 0 while they may."""
        return self._driver.rest.wake_up.total_s

    @property
    def additions(self) -> Hashable:
        """Additions to the weights after all steps sent."""
        return self._driver.scheduler.additions

    @property
    def switch_s(self) -> float:
        """Predicted seconds of a change to other ones."""
        return self._driver.scheduler.prediction.switch_s

    async def reserve_host_memory(self, pinned: Sequence[int] | None) -> None:
        """Let each rank pin host memory in the background, at most its entry of ``pinned`` in bytes (None: all)."""
        limits = [None] * len(self._ranks) if pinned is None else pinned
        ranks = zip(self._ranks, limits, strict=True)
        await asyncio.gather(*(rank.reserve_host_memory.remote(limit) for rank, limit in ranks))

    async def memory_uses(self) -> list[MemoryUse]:
        """Return each rank's memory use."""
        uses: list[MemoryUse] = await asyncio.gather(*(rank.memory_use.remote() for rank in self._ranks))
        return uses

    async def load_addition(self, source: Any) -> int:
        """Load an addition to the weights on all ranks, and return its largest size in bytes.

        ValueError if it does not suit the model, ``GangBrokenError`` if a rank dies or is late.
        """
        answers: list[int | Exception] = await self._driver.call_ranks(lambda rank: rank.load_addition.remote(source))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return max(answer for answer in answers if isinstance(answer, int))

    async def remove_addition(self, source: Any) -> None:
        """Release an addition on all ranks once no job needs it."""
        await self._driver.call_ranks(lambda rank: rank.remove_addition.remote(source))

    def demand(self) -> Demand:
        """Return the open work."""
        return self._driver.admission.demand()

    async def spent_s(self, job_id: str) -> float:
        """See ``JobTable.spent_s``."""
        return await self._driver.spent_s(job_id)

    async def check_health(self) -> None:
        """Ping all ranks. ``RayActorError`` escapes, and Serve replaces the replica at once.

        A rank that misses the ping deadline breaks the gang, except while it may be compiling: then the step's
        deadline counts. The check of a broken gang never passes: see ``_await_death``.
        """
        if not self._is_broken:
            await self._check_answers()
        if self._is_broken:  # perhaps during the pings
            await self._await_death()

    async def breaks_within(self, seconds: float) -> bool:
        """Return whether the gang is broken, as soon as it is, or False when ``seconds`` are over."""
        with suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await self._driver.ended.wait()
        return self._is_broken

    def hand_on(self) -> None:
        """Fail all jobs that wait, and all that come, with a ``GangBrokenError`` of cause "closed". The others end."""
        self._driver.hand_on()

    async def close(self) -> None:
        """Fail the jobs that are open, release engines, then communicators, then end the rank processes.

        A second call returns when the first one does.
        """
        if self.broken is None:
            self._driver.stop(GangBrokenError("the gang is closed", "closed"))
            try:
                async with self._clock.timeout(self.config.step_deadline_s):
                    await asyncio.gather(*(rank.close.remote() for rank in self._ranks))
            except Exception as error:
                logger.warning("ranks did not close in order: %s", error)
            finally:  # also if the replica is cancelled meanwhile
                self._closed.set()
                kill_ranks(self._ranks)
        elif not self._is_broken:
            await self._closed.wait()

    @property
    def _is_broken(self) -> bool:
        return self.broken is not None and self.broken.cause != "closed"

    async def _check_answers(self) -> None:
        pings = [asyncio.ensure_future(rank.ping.remote()) for rank in self._ranks]
        try:
            with suppress(TimeoutError):
                async with self._clock.timeout(self.config.ping_deadline_s):
                    await asyncio.wait(pings, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.wait(pings, timeout=ANSWERS_WITHIN_S)
            for ping in pings:
                if ping.done():
                    ping.result()
            if all(ping.done() for ping in pings):
                return
        finally:
            for ping in pings:
                ping.cancel()
        if self._driver.is_cold:
            logger.warning("no answer to a ping during the first step of a new shape")
            return
        reason = f"a rank did not answer a ping within {self.config.ping_deadline_s:g} s"
        self._driver.break_gang(GangBrokenError(reason, "deadline"))

    async def _await_death(self) -> None:
        """Raise the ``RayActorError`` of a broken gang's rank; ``GangBrokenError`` if none comes in time.

        Pings prove nothing here: a rank that hangs in an exchange answers them until the kill takes effect. Serve
        replaces a replica after three consecutive errors of any other type.
        """
        assert self.broken is not None
        try:
            async with self._clock.timeout(DEATH_WITHIN_S):
                await asyncio.gather(*(rank.watch.remote() for rank in self._ranks))
        except TimeoutError:
            raise GangBrokenError(self.broken.reason, self.broken.cause) from None


async def _fetched(event: JobEvent) -> JobEvent | None:
    """Return the event with its latents fetched; None for a lost preview."""
    if isinstance(event, Progress | JobQueued):
        return event
    reference: Any = event.latents
    try:
        return replace(event, latents=await reference)
    except ObjectLostError as error:
        if isinstance(event, JobDone):
            raise
        logger.warning("the preview after step %d is lost: %s", event.step, error)
        return None
