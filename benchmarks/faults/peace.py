"""Checks after the storm: the application must be well again without help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faults.clients import Clients
from benchmarks.faults.kills import processes_of
from benchmarks.faults.storm import IN_PEACE
from benchmarks.faults.visits import BODIES, Visit
from deployments.cli.local import uses_proxies

WITHIN_S = 300.0
POLL_S = 0.5
OPEN_JOBS = ("troupe_jobs_running", "troupe_jobs_waiting")

Processes = Mapping[str, int]


def num_processes(server: psutil.Process) -> Processes:
    """Return the number of processes of each kind."""
    return {kind: len(found) for kind, found in processes_of(server).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peace:
    """The state that the application must come back to."""

    clients: Clients
    metrics_url: str
    server: psutil.Process
    before: Processes
    """Processes before the storm."""

    async def broken(self) -> list[str]:
        """Wait until all is well. Return what is not in time."""
        looks: dict[str, Callable[[], Awaitable[str]]] = {
            "health": self._unhealthy,
            "processes": self._other_processes,
            "clips": self._unfinished_clips,
            "jobs": self._open_jobs,
        }
        broken = [f"{name}: {last}" for name, look in looks.items() if (last := await _last_word(look))]
        return [*broken, *[line async for line in self._not_right()]]

    async def _unhealthy(self) -> str:
        response = await self.clients.http.get("/health")
        return "" if response.status_code == httpx.codes.OK else response.text

    async def _other_processes(self) -> str:
        now = await asyncio.to_thread(num_processes, self.server)
        return "" if now == self.before else f"{now}, and {self.before} before"

    async def _unfinished_clips(self) -> str:
        """Return the ids of unfinished clips, also of those whose client lost the connection before it got the id."""
        unfinished = []
        for key in range(len(self.clients.keys)):
            headers = self.clients.headers(key)
            page = (await self.clients.http.get("/v1/videos", params={"limit": 100}, headers=headers)).json()
            unfinished += [one["id"] for one in page["data"] if one["status"] in ("queued", "in_progress")]
        return ", ".join(unfinished)

    async def _open_jobs(self) -> str:
        async with httpx.AsyncClient(trust_env=uses_proxies(self.metrics_url)) as http:
            text = (await http.get(self.metrics_url)).text
        num = {
            (sample.name, sample.labels["model"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in OPEN_JOBS and sample.value
        }
        return str(num) if num else ""

    async def _not_right(self) -> AsyncIterator[str]:
        """Yield what is not made as before the storm. A refused request is sent again: after a kill a moment ago, the
        replacement may not be ready yet."""
        end_s = time.monotonic() + WITHIN_S
        for kind in IN_PEACE:
            for number in range(len(BODIES[kind])):
                visit = Visit(kind=kind, number=number, key=0)
                outcome = await self.clients.visit(visit)
                while outcome.end == "refused" and time.monotonic() < end_s:
                    await asyncio.sleep(POLL_S)
                    outcome = await self.clients.visit(visit)
                if outcome.end != "right":
                    yield f"{kind} {number} after the storm: {outcome.end} {outcome.code} {outcome.note}"


async def _last_word(look: Callable[[], Awaitable[str]]) -> str:
    """Return "" as soon as ``look`` does, else what it returns when the time is over."""
    end_s, word = time.monotonic() + WITHIN_S, "no answer"
    while word and time.monotonic() < end_s:
        try:
            word = await look()
        except (httpx.TransportError, KeyError, ValueError) as error:
            word = repr(error)
        if word:
            await asyncio.sleep(POLL_S)
    return word
