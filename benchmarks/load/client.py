"""Requests that are sent at their times, and the outcome of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from benchmarks.application.client import stages_ms
from benchmarks.load.mix import Arrival, Kind, RequestClass
from deployments.cli.local import uses_proxies

TIMEOUT_S = 1200.0
NO_HEADERS: Mapping[str, str] = {}
FROM_S = 0.05
"""Time before the first arrival."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The server's answer, with what its headers report."""

    status: int
    """0 for a connection that ended without an answer."""
    stages_ms: dict[str, float] = field(default_factory=dict)
    eta_s: float | None = None
    """Predicted time of the whole when it came to a gang. None without a prediction."""
    gpu_s: float = 0.0
    """Ranks' time in its steps."""

    @classmethod
    def of(cls, response: httpx.Response) -> Answer:
        headers = response.headers
        return cls(
            status=response.status_code,
            stages_ms=stages_ms(headers.get("server-timing", "")),
            eta_s=float(headers["x-troupe-eta"]) if "x-troupe-eta" in headers else None,
            gpu_s=float(headers.get("x-troupe-gpu-seconds", 0.0)),
        )

    @property
    def eta_error(self) -> float | None:
        """Error of the prediction as a share of the server's own total. None without a prediction."""
        total_s = self.stages_ms.get("total", 0.0) / 1e3
        return None if self.eta_s is None or not total_s else abs(self.eta_s - total_s) / total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Answer):
    """The answer to a request of class ``name`` that came ``at_s``."""

    name: str
    owner: str = ""
    kind: Kind = "picture"
    num_media: int = 1
    at_s: float
    late_s: float
    """Delay of sending it."""
    latency_s: float
    """Time from arrival to answer."""

    @property
    def is_right(self) -> bool:
        return self.status == httpx.codes.OK

    @property
    def each_gpu_s(self) -> float:
        """GPU-seconds of one of its pictures or clips."""
        return self.gpu_s / self.num_media


async def send_all(url: str, arrivals: Sequence[Arrival], headers: dict[str, str]) -> list[Outcome]:
    """Send each at its time, with its owner's key or ``headers``. Return the outcomes in order of arrival."""
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, limits=no_limit, headers=headers, trust_env=uses_proxies(url)
    ) as client:
        start_s = time.perf_counter() + FROM_S
        return await asyncio.gather(*(_send(client, one, start_s) for one in arrivals))


async def _send(client: httpx.AsyncClient, arrival: Arrival, start_s: float) -> Outcome:
    await asyncio.sleep(start_s + arrival.at_s - time.perf_counter())
    sent_s = time.perf_counter()
    headers = arrival.owner.headers if arrival.owner else {}
    answer = await answered(client, arrival.kind, arrival.seed, headers)
    return Outcome(
        name=arrival.kind.name,
        owner=arrival.owner.name if arrival.owner else "",
        kind=arrival.kind.kind,
        num_media=arrival.kind.num_media,
        at_s=arrival.at_s,
        late_s=sent_s - start_s - arrival.at_s,
        latency_s=time.perf_counter() - start_s - arrival.at_s,
        **asdict(answer),
    )


async def answered(
    client: httpx.AsyncClient, kind: RequestClass, seed: int, headers: Mapping[str, str] = NO_HEADERS
) -> Answer:
    """Send one request, with ``headers`` beside those of the client."""
    body: dict[str, Any] = {**kind.body, "seed": seed}
    try:
        return Answer.of(await client.post(kind.path, json=body, headers=headers))
    except httpx.HTTPError:
        return Answer(status=0)
