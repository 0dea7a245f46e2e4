"""Requests that are sent when their time has come, and what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.load.arrivals import Arrival
from benchmarks.load.mix import RequestClass
from benchmarks.serving.clients import stages_ms

TIMEOUT_S = 1200.0
FROM_S = 0.05
"""So long before the first arrival."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """``status`` 0 is a connection that ended without an answer. ``late_s`` is how late the request was sent."""

    name: str
    at_s: float
    late_s: float
    latency_s: float
    status: int
    stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return self.status == httpx.codes.OK


async def send_all(url: str, arrivals: Sequence[Arrival], headers: dict[str, str]) -> list[Outcome]:
    """Sends each at its time; returns when all have been answered, in the order of their arrival."""
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=no_limit, headers=headers) as client:
        start_s = time.perf_counter() + FROM_S
        return await asyncio.gather(*(_send(client, one, start_s) for one in arrivals))


async def _send(client: httpx.AsyncClient, arrival: Arrival, start_s: float) -> Outcome:
    await asyncio.sleep(start_s + arrival.at_s - time.perf_counter())
    sent_s = time.perf_counter()
    status, stages_ms = await answered(client, arrival.kind, arrival.seed)
    return Outcome(
        name=arrival.kind.name,
        at_s=arrival.at_s,
        late_s=sent_s - start_s - arrival.at_s,
        latency_s=time.perf_counter() - start_s - arrival.at_s,
        status=status,
        stages_ms=stages_ms,
    )


async def answered(client: httpx.AsyncClient, kind: RequestClass, seed: int) -> tuple[int, dict[str, float]]:
    """The status of one request, and the milliseconds of its stages."""
    body: dict[str, Any] = {**kind.body, "seed": seed}
    try:
        answer = await client.post(kind.path, json=body)
    except httpx.HTTPError:
        return 0, {}
    return answer.status_code, stages_ms(answer.headers.get("server-timing", ""))


async def lone_times_s(
    url: str, kinds: Sequence[RequestClass], repeats: int, headers: dict[str, str]
) -> dict[str, float]:
    """Median seconds of a request of each class when nothing else is there; the first of each is not counted.

    RuntimeError if one is not answered.
    """
    times: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=headers) as client:
        for kind in kinds:
            several = []
            for seed in range(repeats + 1):
                start_s = time.perf_counter()
                status, _ = await answered(client, kind, seed)
                several.append(time.perf_counter() - start_s)
                if status != httpx.codes.OK:
                    raise RuntimeError(f"a request of class {kind.name} alone was answered {status}")
            times[kind.name] = sorted(several[1:])[repeats // 2]
    return times
