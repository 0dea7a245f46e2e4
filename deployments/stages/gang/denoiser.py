"""Serve deployment: one replica holds one gang, which turns conditioning into latents."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from functools import partial

import psutil
import ray

from deployments.config import ModelConfig
from deployments.forked_workers import python_like_own
from deployments.observability.exposition import Counted, counted_here
from deployments.replicas import is_on_loopback, prepare_replica
from deployments.settings import process_environment
from deployments.stages.common import Encoded, EncodingDone, StageEvent
from deployments.stages.gang.rank import LoadRankParts
from deployments.stages.measured_times import estimates_s_of, step_times_of
from engines.core.phases import log_phase
from engines.core.transport.parcel import Shapes
from engines.gang.errors import QueueFullError
from engines.gang.gang import Gang
from engines.gang.jobs.job import Job
from engines.registry import rank_environment
from pipelines.caching import computed_steps
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest, ServiceTier

logger = logging.getLogger(__name__)

EVENTS_EVERY_S = 0.1
"""Progress for people: no faster than they can see."""


PRIORITIES: Mapping[ServiceTier, float] = {"flex": 0.25, "default": 1.0, "priority": 4.0}
"""Jobs count as if they took so many times less."""

WATCHED_S = 0.8
"""Of the second from one health check to the next."""

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}


def node_environment(engine: str) -> Mapping[str, str]:
    """Return the variables to start ranks with on the node where it is called, from that node's own.

    NCCL's own sockets, which go to the address of the machine by default, stay on a cluster's loopback.
    """
    environment = process_environment()
    local = LOOPBACK if is_on_loopback() else {}
    own = {name: value for name, value in local.items() if name not in environment}
    return {**own, **rank_environment(engine, environment)}


def shape_of(request: MediaRequest, encoded: Shapes) -> tuple[Hashable, ...]:
    """Return what the steps of equal ones have alike."""
    num_frames = request.num_layers or request.num_frames
    silence = ("silent",) if request.sound is False else ()  # fewer tokens, of some models
    return request.width, request.height, num_frames, request.true_cfg_scale > 1, encoded, *silence


def idle_steps(request: MediaRequest, num_steps: int) -> frozenset[int]:
    """Return the steps, counted from 1, that make no forwards."""
    computed = computed_steps(request.cache, num_steps)
    return frozenset(step for step, makes_forwards in enumerate(computed, 1) if not makes_forwards)


class Denoiser:
    """Thin: the gang does the work. A broken gang fails ``check_health``, and Serve replaces the replica."""

    async def __init__(self, model: ModelConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_replica()
        log_phase("replica: process", time.time() - psutil.Process().create_time(), model=model.name)
        self._checkpoint = Checkpoint.open(model.source, weights=False)
        self._gang = await Gang.start(
            model.denoiser,
            LoadRankParts(model=model),
            model=model.name,
            environment=partial(node_environment, model.denoiser.engine),
            python=python_like_own("model"),
            step_times=partial(step_times_of, model, self._checkpoint.path),
        )
        self._is_watched = False
        self._check: asyncio.Future[None] | None = None

    async def denoise(
        self,
        job_id: str,
        request: MediaRequest,
        encoded: list[ray.ObjectRef[Encoded]],
        exclusive: bool = False,
        decode_s: float = 0.0,
        accepted: bool = False,
    ) -> AsyncGenerator[tuple[StageEvent, ...]]:
        """Steps, previews and at last ``JobDone``. Closing the iterator cancels the job on all ranks.

        Events come in groups, ``EVENTS_EVERY_S`` apart: each group is a millisecond's work in two processes.
        ``encoded`` is a list of one reference, so that this call need not wait for the encoder to be sent. It belongs
        to the caller, which keeps it until the job has ended, whatever becomes of the encoder.
        ``exclusive``: beside no other job, as a request runs whose gang broke under it. Decoding will take
        ``decode_s``, as far as that is known: its deadline leaves the steps so much less. ``accepted``: see ``Job``.
        """
        came_s, encoding = time.monotonic(), await encoded[0]
        waited_s = time.monotonic() - came_s
        num_steps = self._checkpoint.num_steps(request)
        job = Job(
            job_id=job_id,
            request=request,
            conditioning=encoded[0],
            num_steps=num_steps,
            idle_steps=idle_steps(request, num_steps),
            preview_steps=frozenset(request.preview_steps),
            shape=shape_of(request, encoding.shapes),
            estimates_s=estimates_s_of(request, encoding.shapes, self._gang.estimates),
            exclusive=exclusive,
            request_id=request.request_id,
            priority=PRIORITIES[request.service_tier],
            deadline_s=request.deadline_s,
            waited_s=request.waited_s + waited_s,
            decode_s=decode_s,
            key=request.key,
            weight=request.weight,
            accepted=accepted,
        )
        first: tuple[StageEvent, ...] = (EncodingDone(encode_s=encoding.encode_s, was_kept=encoding.was_kept),)
        logger.info("job is queued", extra=job.log_fields)
        async with aclosing(self._gang.submit_grouped(job, every_s=EVENTS_EVERY_S)) as groups:
            try:
                async for group in groups:
                    yield (*first, *group)
                    first = ()
            except QueueFullError as refusal:
                yield (refusal,)

    async def spent_s(self, job_id: str) -> float:
        """Return how long ranks of this gang were at work for a job that was cancelled or has failed, once they have
        told; 0 of a job that was not here, or whose gang broke."""
        return await self._gang.spent_s(job_id)

    async def metrics(self) -> Counted:
        """Return this replica's name, and what it has counted."""
        return counted_here()

    async def check_health(self) -> None:
        """See ``Gang.check_health``, which may take ranks a while: it goes on from one call to the next.

        A call ends within two seconds, so that Serve takes only a replica that hangs for one. All calls but the first,
        for which Serve waits, last until it is almost time for the next: Serve, which looks ten times a second whether
        a check has ended, hears of a broken gang at once.
        """
        if self._check is None:
            self._check = asyncio.ensure_future(self._gang.check_health())
        await asyncio.wait({self._check}, timeout=WATCHED_S)
        if self._check.done():
            check, self._check = self._check, None
            check.result()
        if self._is_watched and await self._gang.breaks_within(WATCHED_S):
            await self._gang.check_health()
        self._is_watched = True

    async def __del__(self) -> None:
        """Serve awaits it when a replica is stopped: engines are released before communicators, then ranks end."""
        gang = getattr(self, "_gang", None)
        if gang is not None:
            await gang.close()
