"""Serve deployment: one replica holds one gang, which turns conditioning into latents."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import TaskCancelledError

from deployments.forked_workers import python_like_own
from deployments.model_config import ModelConfig
from deployments.observability.exposition import ReplicaMetrics, replica_metrics
from deployments.ray_private import before_end, head_id
from deployments.replicas import is_on_loopback, prepare_replica
from deployments.settings import process_environment
from deployments.sharing.share_actor import ShareSpec
from deployments.sharing.share_member import ShareMember
from deployments.stages.common import CHECK_S, PRIORITIES, Encoded, EncodingDone, HealthCheckPace, StageEvent, refusal
from deployments.stages.measured_times import estimates_s_of, step_times_of
from deployments.stages.rank import LoadRankParts
from deployments.stages.replica_load import ReplicaLoad
from engines.core.engine import Forwards
from engines.core.logs import log_phase
from engines.core.parcel import Shapes
from engines.core.resources import MemoryUse
from engines.gang.arbiter import Demand
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.gang import Gang
from engines.gang.jobs.job import Job, JobDone, LastStage
from engines.gang.share_group import GANG
from engines.registry import rank_environment
from pipelines.checkpoint import Checkpoint
from pipelines.request import Lora, MediaRequest, mix_of

logger = logging.getLogger(__name__)

EVENTS_EVERY_S = 0.1
"""Interval of progress events, as fast as people can follow."""
CLOSE_S = 10.0
"""Part of a replica's time to end that is left for the end of its ranks."""
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}


def node_environment(engine: str) -> Mapping[str, str]:
    """Return the variables of ranks on this node, from the node's own.

    On a loopback cluster, NCCL's sockets use the loopback interface too.
    """
    environment = process_environment()
    local = LOOPBACK if is_on_loopback() else {}
    own = {name: value for name, value in local.items() if name not in environment}
    return {**own, **rank_environment(engine, environment)}


def shape_of(request: MediaRequest, encoded: Shapes) -> tuple[Hashable, ...]:
    """Return the key of jobs whose steps have equal shapes."""
    num_frames = request.num_layers or request.num_frames
    silence = ("silent",) if request.sound is False else ()  # some models have fewer tokens then
    attention = (request.attention,) if request.attention else ()
    return request.width, request.height, num_frames, request.true_cfg_scale > 1, encoded, *silence, *attention


def idle_steps(request: MediaRequest, num_steps: int) -> frozenset[int]:
    """Return the steps, counted from 1, that the cache skips."""
    computed = request.computed_steps(num_steps)
    return frozenset(step for step, makes_forwards in enumerate(computed, 1) if not makes_forwards)


class Denoiser:
    """A replica with one gang. A broken gang fails ``check_health``, and Serve replaces the replica."""

    _member: ShareMember | None = None
    """Its part in a group of models that share GPUs."""
    _uses: Sequence[MemoryUse] = ()

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: ModelConfig, share: ShareSpec | None = None, drain_s: float = math.inf
    ) -> None:
        """Start the gang. ``drain_s``: seconds from Serve's order to end until it kills the replica."""
        prepare_replica()
        self._name = serve.get_replica_context().replica_id.unique_id
        log_phase("replica: process", time.time() - psutil.Process().create_time(), model=model.name)
        self._checkpoint = Checkpoint.open(model.source, weights=False)
        shared: dict[str, Any] = {}
        if share is not None:
            self._member = ShareMember(share, model.name, GANG, move=self._move, demand=self._demand)
            shared = {"placement_group": await self._member.bundles(), "gpus": share.rank_gpus(model)}
            shared["grant"] = self._member.grant
            await self._member.may_load()
        self._gang = await Gang.start(
            model.denoiser,
            LoadRankParts(model=model),
            model=model.name,
            environment=partial(node_environment, model.denoiser.engine),
            python=python_like_own("model"),
            step_times=partial(step_times_of, model, self._checkpoint.path),
            **shared,
        )
        start_s, node_id = time.time() - psutil.Process().create_time(), ray.get_runtime_context().get_node_id()
        self._load = ReplicaLoad(self._gang, start_s, node_id, head_id())
        if self._member is not None:
            self._gang.on_open, self._member.on_wake_s = self._member.look, self._gang.expect_wake
            self._uses = await self._gang.memory_uses()
            await self._gang.reserve_host_memory(await self._member.loaded(self._uses))
        self._pace = HealthCheckPace()
        self._check: asyncio.Future[None] | None = None
        before_end(lambda: self._hand_on(drain_s - CLOSE_S))

    def _hand_on(self, close_in_s: float) -> None:
        """Leave waiting jobs to other gangs; those still running in ``close_in_s`` too, which begin again there."""
        logger.info("gang takes no more jobs", extra={"num_open": len(self._gang.open_work())})
        self._gang.hand_on()
        self._closing = asyncio.create_task(self._close_gang(close_in_s))

    async def _close_gang(self, in_s: float) -> None:
        await asyncio.sleep(in_s)
        await self._gang.close()

    async def denoise(
        self,
        job_id: str,
        request: MediaRequest,
        encoded: list[ray.ObjectRef[Encoded | Exception]],
        exclusive: bool = False,
        decode_s: float = 0.0,
        accepted: bool = False,
    ) -> AsyncGenerator[tuple[StageEvent, ...]]:
        """Yield events in groups, ``EVENTS_EVERY_S`` apart. The last is ``JobDone`` or an error.

        Closing cancels the job. Each group costs a millisecond of CPU time in two processes. ``encoded`` is a list of
        one reference, which lets the call start before the encoder is done. The caller owns it until the job ends. It
        is taken out of the list, since a cancelled call's frames live on until a garbage collection (see
        ``Driver.open``). ``exclusive``: run without other jobs, after a gang broke under the request. ``decode_s``:
        predicted decode time, part of the deadline. ``accepted``: see ``Job``.
        """
        start_s = time.monotonic()
        with self._load.coming(job_id, request):
            try:
                encoding = await encoded[0]
            except TaskCancelledError:  # its caller has left
                return
            except BaseException:
                encoded.clear()
                raise
        if isinstance(encoding, Exception):
            encoded.clear()
            yield (encoding,)
            return
        job, waited_s = self._job(job_id, request, encoding), request.waited_s + time.monotonic() - start_s
        job = replace(job, exclusive=exclusive, waited_s=waited_s, decode_s=decode_s, accepted=accepted)
        first: tuple[StageEvent, ...] = (EncodingDone(encode_s=encoding.encode_s, was_kept=encoding.was_kept),)
        logger.info("job is queued", extra=job.log_fields)
        whole = self._gang.submit_grouped(replace(job, conditioning=encoded.pop()), every_s=EVENTS_EVERY_S)
        async with aclosing(whole) as groups:
            try:
                async for group in groups:
                    if isinstance(group[-1], JobDone):
                        self._load.hear(job, group[-1])
                    yield (*first, *group)
                    first = ()
            except (QueueFullError, GangBrokenError, ValueError) as error:
                yield (self._last_event(error, job),)

    def _last_event(self, error: Exception, job: Job) -> Exception:
        """Return the event of an error that ends ``job``; raise a defect."""
        if isinstance(error, GangBrokenError):
            error.replica = self._name
        return refusal(error, **job.log_fields) if isinstance(error, ValueError) else error

    async def _move(self, asleep: bool) -> Sequence[MemoryUse]:
        """Bring the gang's weights to the host, or back."""
        if asleep:
            self._uses = await self._gang.sleep()
        else:
            await self._gang.wake()
        return self._uses

    def _demand(self) -> Demand:
        return self._gang.demand()

    def _job(self, job_id: str, request: MediaRequest, encoding: Encoded) -> Job:
        """Return the job of a request, without what only this run of it has."""
        first, *later = (self._stage(stage, encoding) for stage in request.stages)
        return Job(
            job_id=job_id,
            request=request,
            conditioning=None,
            num_steps=self._checkpoint.num_steps(request),
            idle_steps=idle_steps(request.stages[0], first.num_steps),
            preview_steps=frozenset(request.preview_steps),
            shape=first.shape,
            additions=first.additions,
            estimates_s=first.estimates_s,
            last_stage=later[0] if later else None,
            request_id=request.request_id,
            priority=PRIORITIES[request.service_tier],
            deadline_s=request.deadline_s,
            key=request.key,
            weight=request.weight,
        )

    def _stage(self, request: MediaRequest, encoding: Encoded) -> LastStage:
        references = self._checkpoint.spec.reference_latents
        return LastStage(
            num_steps=self._checkpoint.num_steps(request),
            shape=shape_of(request, encoding.shapes),
            estimates_s=estimates_s_of(request, encoding.shapes, self._gang.estimates, references),
            additions=mix_of(request.loras),
        )

    async def spent_s(self, job_id: str) -> float:
        """Return the GPU seconds of a cancelled or failed job, once reported; 0 if unknown or the gang broke."""
        return await self._gang.spent_s(job_id)

    async def forwards(self) -> Forwards | None:
        """Return how forwards of the gang run, if its engine says so."""
        return self._gang.forwards

    async def load_lora(self, lora: Lora) -> Exception | None:
        """Load an adapter that came at run time on all ranks. Return an error if it does not suit the model."""
        try:
            await self._gang.load_addition(lora)
        except ValueError as error:
            return refusal(error, lora=lora.name)
        return None

    async def remove_lora(self, lora: Lora) -> None:
        """Let all ranks release an adapter once no job needs it."""
        await self._gang.remove_addition(lora)

    async def metrics(self) -> ReplicaMetrics:
        """Return this replica's name and its metrics."""
        return replica_metrics()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the open jobs and what the gang is warm for. Serve passes it to the routers."""
        return self._load.routing_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the predicted work. Serve passes it to the autoscaling policy."""
        return self._load.autoscaling_stats()

    async def check_health(self) -> None:
        """Raise if the gang is broken. One ``Gang.check_health`` may span several calls.

        Serve polls running checks ten times a second, and so learns of a broken gang fast.
        """
        with self._pace.call() as left_s:
            if self._member is not None and self._gang.is_whole:
                self._member.check()
            if self._check is None:
                self._check = asyncio.ensure_future(self._gang.check_health())
            check = self._check
            await asyncio.wait({check}, timeout=CHECK_S)
            if check.done():
                if self._check is check:  # a call that Serve has given up on may still be here
                    self._check = None
                check.result()
            if (wait_s := left_s()) and await self._gang.breaks_within(wait_s):
                await self._gang.check_health()

    async def __del__(self) -> None:
        """Release engines, then communicators, then end ranks. Serve awaits it when a replica is stopped."""
        member, gang = getattr(self, "_member", None), getattr(self, "_gang", None)
        if member is not None:
            await member.close()
        if gang is not None:
            await gang.close()
