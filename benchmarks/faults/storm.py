"""The storm: turns of clients, some at a time. Then peace, when the application must be well again without help."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faults.clients import BODIES, LONGEST_PAUSE_S, Clients, Kind, Outcome, Turn, Visit
from benchmarks.faults.kills import processes_of
from benchmarks.results import percentile
from deployments.cli.local import uses_proxies

CARRIERS = ("ingress", "proxy")
"""Processes that carry a connection: it is cut when one of them dies. A stopped one dies at its next health check."""
CARRIER_DIES_WITHIN_S = 60.0
IN_PEACE: tuple[Kind, ...] = ("picture", "edit", "clip")
"""Kinds that together ask for each body once: ``stream`` and ``sync`` give the same bytes."""
PICTURE_TO_EDIT = 1
"""Index among the pictures."""
SAY_EVERY = 50


async def draw_references(clients: Clients) -> None:
    """Ask for everything once while all is well. RuntimeError if something is not made."""
    for kind in IN_PEACE:
        for number in range(len(BODIES[kind])):
            outcome = await clients.visit(Visit(kind=kind, number=number, key=0))
            if outcome.end != "right":
                raise RuntimeError(f"{kind} {number} was {outcome.end} before the storm: {outcome.code} {outcome.note}")
        if kind == "picture":
            clients.source = clients.references["/v1/images/generations", PICTURE_TO_EDIT]


async def ride_out(
    clients: Clients, turns: Iterable[Turn], num_at_once: int, say: Callable[[str], None], within_s: float = math.inf
) -> list[Outcome]:
    """Return how every visit ended. ``num_at_once`` turns run at a time; none begins after ``within_s``.

    A client that is refused waits before its next turn as long as it was told, and twice as long after each further
    refusal in a row, up to ``LONGEST_PAUSE_S``.
    """
    outcomes: list[Outcome] = []
    last_s = time.monotonic() + within_s
    waiting = itertools.takewhile(lambda turn: time.monotonic() < last_s, turns)

    async def take_turns() -> None:
        num_refused = 0
        for turn in waiting:
            ended = await asyncio.gather(*(clients.visit(visit) for visit in turn))
            for outcome in ended:
                outcomes.append(outcome)
                if len(outcomes) % SAY_EVERY == 0:
                    say(f"{len(outcomes)} ended: {dict(Counter(one.end for one in outcomes))}")
            if len(ended) == 1 and ended[0].end == "refused":
                await asyncio.sleep(min(ended[0].retry_s * 2**num_refused, LONGEST_PAUSE_S))
                num_refused += 1
            else:
                num_refused = 0

    await asyncio.gather(*(take_turns() for _ in range(num_at_once)))
    return outcomes


def summary(outcomes: Sequence[Outcome], struck: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return counts, and under "lost" a line for each outcome that must not be."""
    cut_by_kill = [one for one in outcomes if one.end == "cut" and was_cut_by_kill(one, struck)]
    wrong = [one for one in outcomes if one.end in ("cut", "wrong_bytes", "no_reason", "hung")]
    right_s = [one.ended_s - one.began_s for one in outcomes if one.end == "right"]
    return {
        "requests": len(outcomes),
        "ends": dict(sorted(Counter(one.end for one in outcomes).items())),
        "by_kind": dict(sorted(Counter(f"{one.kind} {one.end}" for one in outcomes).items())),
        "reasons": dict(sorted(Counter(one.code for one in outcomes if one.end == "refused").items())),
        "cut_by_kill": len(cut_by_kill),
        "right_s": {
            "median": round(median(right_s), 2) if right_s else None,
            "p95": round(percentile(right_s, 95), 2) if right_s else None,
        },
        "lost": [f"{one.kind} {one.end}: {one.code} {one.note}" for one in wrong if one not in cut_by_kill],
    }


def was_cut_by_kill(outcome: Outcome, struck: Sequence[tuple[float, str]]) -> bool:
    """Return whether a process that carried the connection was struck while it was open, or shortly before."""
    return any(
        kind in CARRIERS and outcome.began_s - CARRIER_DIES_WITHIN_S <= at_s <= outcome.ended_s for at_s, kind in struck
    )


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
        """Wait until all is well. Return the faults that are left when the time is over."""
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
    """Return "" as soon as ``look`` does, else its result when the time is over."""
    end_s, word = time.monotonic() + WITHIN_S, "no answer"
    while word and time.monotonic() < end_s:
        try:
            word = await look()
        except (httpx.TransportError, KeyError, ValueError) as error:
            word = repr(error)
        if word:
            await asyncio.sleep(POLL_S)
    return word
