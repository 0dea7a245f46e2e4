"""Start of a gang: processes, communicator, weights, engines. Each phase has its deadline, and all have pings."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from engines.core.logs import log_phase
from engines.core.resources import MemoryUse
from engines.gang.errors import GangBrokenError
from engines.gang.gang_config import BuiltRank, Clock, Environment, GangConfig, LoadRank
from engines.gang.metrics import PHASES
from engines.gang.placement import rank_strategy
from engines.gang.rank import RankInfo, kill_ranks

PING_EVERY_S = 1.0
Grant = Callable[[Sequence[MemoryUse]], Awaitable[Sequence[int] | None]]
"""Takes each rank's memory use and returns the host memory that it may pin (None: all)."""

logger = logging.getLogger(__name__)


class Start:
    """Takes ``ranks``, made by ``spawn``, through the phases of ``config``. Must be made in the gang's event loop.

    A phase ends when all ranks have done it. An exception of a rank is raised unchanged; ranks that are late or answer
    no ping raise GangBrokenError. Without pings, a stopped process would delay the others until the phase's deadline.
    Ranks whose processes do not run in time are killed and spawned anew; all others are left to the caller.
    ``grant`` is called with loaded weights: ranks touch the host memory that it returns while they build.
    """

    def __init__(
        self,
        config: GangConfig,
        spawn: Callable[[], Sequence[Any]],
        clock: Clock,
        model: str = "unnamed",
        *,
        is_forked: bool = False,
        grant: Grant | None = None,
    ) -> None:
        self._config, self._spawn, self._clock, self._model, self._grant = config, spawn, clock, model, grant
        self.ranks: Sequence[Any] = ()
        self._silence_s = config.silence_s(is_forked=is_forked)
        self._end_s = clock.now_s() + config.start_deadline_s
        self._pings: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, load: LoadRank) -> tuple[list[RankInfo], BuiltRank]:
        """Return the ranks' infos, and the built parts, which are equal on all ranks."""
        config = self._config
        try:
            with self._timed("processes"):
                await self._start_processes()
                self._pings = asyncio.ensure_future(self._ping())
                process_s = config.process_deadline_s
                await self._phase("open their devices", process_s, lambda rank: rank.open.remote())
            with self._timed("connect"):
                infos = await self._connect()
            with self._timed("load"):
                await self._phase("load their weights", config.load_deadline_s, lambda rank: rank.load.remote(load))
                await self._prepare_host_memory()
            with self._timed("build"):
                build_s = config.build_deadline_s
                built = await self._phase("build their engines", build_s, lambda rank: rank.build.remote())
        finally:
            self._pings.cancel()
            await asyncio.gather(self._pings, return_exceptions=True)
        assert len(built) == len(self.ranks)
        return infos, built[0]

    async def _prepare_host_memory(self) -> None:
        """Let ranks touch the granted host memory while they build."""
        if self._grant is None:
            return
        uses = await self._phase("say their memory", None, lambda rank: rank.memory_use.remote())
        limits = await self._grant(uses)
        next_limit = repeat(None) if limits is None else iter(limits)  # ranks are called in order
        await self._phase("take host memory", None, lambda rank: rank.prepare_host_memory.remote(next(next_limit)))

    async def _start_processes(self) -> None:
        """Spawn ranks until all answer. One that hangs before its first ping, as in an import, is only seen by time."""
        *first_s, last_s = self._config.process_attempts_s()
        for limit_s in first_s:
            with suppress(GangBrokenError):
                await self._try_processes(limit_s)
                return
            logger.warning("processes of ranks hang and are replaced", extra={"model": self._model, "limit_s": limit_s})
            kill_ranks(self.ranks)
        await self._try_processes(last_s)

    async def _try_processes(self, limit_s: float) -> None:
        self.ranks = self._spawn()
        await self._phase("start their processes", limit_s, lambda rank: rank.ping.remote())

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Record the duration of the block, unless it raises."""
        started_s = self._clock.now_s()
        yield
        took_s = self._clock.now_s() - started_s
        PHASES.labels(self._model, phase).observe(took_s)
        log_phase(f"gang: {phase}", took_s, model=self._model)

    async def _connect(self) -> list[RankInfo]:
        started_s, deadline_s = self._clock.now_s(), self._config.connect_deadline_s
        (address,) = await self._phase("connect", deadline_s, lambda rank: rank.open_store.remote(), self.ranks[:1])
        left_s = deadline_s - (self._clock.now_s() - started_s)
        return await self._phase("connect", left_s, lambda rank: rank.join.remote(address))

    async def _phase(
        self,
        action: str,
        deadline_s: float | None,
        call: Callable[[Any], Awaitable[Any]],
        ranks: Sequence[Any] | None = None,
    ) -> list[Any]:
        limit_s = max(0.0, min(math.inf if deadline_s is None else deadline_s, self._end_s - self._clock.now_s()))
        answers = [asyncio.ensure_future(_answer(call(rank))) for rank in ranks or self.ranks]
        together = asyncio.gather(*answers)
        try:
            with suppress(TimeoutError):
                async with self._clock.timeout(limit_s):
                    await asyncio.wait((together, self._pings), return_when=asyncio.FIRST_COMPLETED)
            if together.done():
                return together.result()
            if self._pings.done():
                self._pings.result()
            late = [rank for rank, answer in enumerate(answers) if not answer.done()]
            raise GangBrokenError(f"ranks {late} did not {action} within {limit_s:g} s", "deadline")
        finally:
            together.cancel()
            await asyncio.gather(together, return_exceptions=True)

    async def _ping(self) -> None:
        """Ping for ever; raise ``GangBrokenError`` when a rank is silent for longer than allowed."""
        silence_s = self._silence_s
        while True:
            answers = [asyncio.ensure_future(_answer(rank.ping.remote())) for rank in self.ranks]
            try:
                with suppress(TimeoutError):
                    async with self._clock.timeout(silence_s):
                        await asyncio.wait(answers)
                if silent := [rank for rank, answer in enumerate(answers) if not answer.done()]:
                    raise GangBrokenError(f"ranks {silent} answered no ping for {silence_s:g} s", "deadline")
                await asyncio.gather(*answers)
            finally:
                for answer in answers:
                    answer.cancel()
            with suppress(TimeoutError):
                async with self._clock.timeout(PING_EVERY_S):
                    await asyncio.Event().wait()


async def _answer(ref: Awaitable[Any]) -> Any:
    return await ref


async def rank_environments(
    config: GangConfig, group: PlacementGroup, environment: Callable[[], Environment] | None, clock: Clock
) -> Sequence[Environment]:
    """Return each rank's variables, by ``environment`` on its node. ``GangBrokenError`` after the process deadline."""
    if environment is None:
        return [{}] * config.num_ranks
    if config.num_nodes == 1:  # the group is packed: this process is on the ranks' node
        return [environment()] * config.num_ranks
    firsts = [node * config.ranks_per_node for node in range(config.num_nodes)]
    task: Any = ray.remote(num_cpus=0)(_call)
    answers = [
        task.options(scheduling_strategy=rank_strategy(config, rank, group)).remote(environment) for rank in firsts
    ]
    within_s = config.process_deadline_s
    try:
        async with clock.timeout(within_s):
            by_node: list[Environment] = await asyncio.gather(*answers)
    except TimeoutError:
        raise GangBrokenError(f"nodes did not say what their ranks need within {within_s:g} s", "deadline") from None
    return [by_node[rank // config.ranks_per_node] for rank in range(config.num_ranks)]


def _call(environment: Callable[[], Environment]) -> Environment:
    return environment()
