"""Measured times: headers of answers, and GET /v1/usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from deployments.http.context import ApiContext
from deployments.http.errors import GPU_HEADER
from deployments.http.openapi_text import error_documents
from deployments.requests.rules import Requester
from deployments.service.interface import Media, Progress, ServiceEvent, StageTimes
from pipelines.caching import CacheMode
from pipelines.request import MediaRequest

ETA_HEADER = "X-Troupe-Eta"
ENHANCER_HEADER = "X-Troupe-Prompt-Enhancer"


class KeyUsage(BaseModel):
    object: Literal["usage"] = "usage"
    started_at: int = Field(description="Start of the account, in Unix seconds.")
    num_requests: int = Field(description="Number of finished pictures and clips.")
    gpu_seconds: float = Field(description="Rank-seconds of their steps, and of requests that the client stopped.")
    gpu_seconds_last_minute: float
    gpu_seconds_per_minute: float | None = Field(description="Limit of gpu_seconds_last_minute; null: none.")
    max_concurrent: int | None = Field(description="Limit of concurrent pictures and clips; null: none.")
    weight: float = Field(description="Share relative to other keys, with the policy fair.")


def usage_routes(context: ApiContext) -> APIRouter:
    router, authorized = APIRouter(tags=["usage"]), Depends(context.authorize)

    @router.get("/v1/usage", responses=error_documents(401, 503))
    async def read_usage(requester: Requester = authorized) -> KeyUsage:
        """Report usage and limits of the request's key; without keys, of all requests. Beyond OpenAI."""
        key = requester.key
        limits, usage = context.accounts.limits_of(key), await context.accounts.used(key)
        return KeyUsage(
            started_at=usage.since,
            num_requests=usage.num_requests,
            gpu_seconds=round(usage.gpu_s, 3),
            gpu_seconds_last_minute=round(usage.last_minute_s, 3),
            gpu_seconds_per_minute=limits.gpu_seconds_per_minute,
            max_concurrent=limits.max_concurrent,
            weight=limits.weight,
        )

    return router


def measures(timings: list[StageTimes], cache: CacheMode) -> dict[str, str]:
    """Return headers: timings, predictions, whether all shapes were warm, and the ``cache``."""
    is_warm = all(one.was_warm for one in timings)
    return {
        "Server-Timing": server_timing(timings),
        "X-Troupe-Warm": "true" if is_warm else "false",
        "X-Troupe-Cache": cache,
        "X-Troupe-Same-Bytes": "true" if all(one.same_bytes for one in timings) else "false",
        **gpu_header(sum(one.gpu_s for one in timings)),
        **eta_header([one.eta_s for one in timings]),
    }


def gpu_header(gpu_s: float | None) -> dict[str, str]:
    """Return the header with the GPU-seconds of a request; none if unknown."""
    return {} if gpu_s is None else {GPU_HEADER: seconds(gpu_s)}


def enhancer_header(request: MediaRequest) -> dict[str, str]:
    """Return the header with the outcome of the prompt enhancer; none if no enhancer was asked."""
    return {} if request.enhancer_outcome is None else {ENHANCER_HEADER: request.enhancer_outcome}


class SpentSeconds:
    """GPU-seconds of the pictures of one request, as far as their events say."""

    def __init__(self) -> None:
        self._by_index: dict[int, float] = {}

    def update(self, index: int, event: ServiceEvent) -> None:
        """Take note of an event of the picture ``index``."""
        match event:
            case Progress(gpu_s=gpu_s) | Media(timings=StageTimes(gpu_s=gpu_s)):
                self._by_index[index] = gpu_s

    @property
    def header(self) -> dict[str, str]:
        """The header of an answer that is an error; none before any work."""
        return gpu_header(sum(self._by_index.values()) or None)


def eta_header(etas_s: Sequence[float | None]) -> dict[str, str]:
    """Return the header with the longest prediction; none if one is missing."""
    known_s = [eta_s for eta_s in etas_s if eta_s is not None]
    return {ETA_HEADER: seconds(max(known_s))} if len(known_s) == len(etas_s) > 0 else {}


def seconds(value: float) -> str:
    """Return seconds in the format of headers."""
    return f"{value:.3f}"


def server_timing(timings: list[StageTimes]) -> str:
    """Return a ``Server-Timing`` header in milliseconds: each stage's slowest of concurrent pictures."""
    stages = ("queue", "encode", "denoise", "decode", "total")
    slowest = {stage: max(getattr(one, f"{stage}_s") for one in timings) for stage in stages}
    return ", ".join(f"{stage};dur={1000 * seconds:.1f}" for stage, seconds in slowest.items())
