"""Serve deployment: one replica holds one gang, which turns conditioning into latents."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial

import ray

from deployments.config import ModelConfig
from deployments.observability.exposition import Counted, counted_here
from deployments.replicas import prepare_replica
from deployments.settings import process_environment
from deployments.stages.common import Encoded
from deployments.stages.rank import BuildRankParts
from engines.gang.gang import Gang
from engines.gang.job import Job, JobEvent
from engines.registry import rank_environment
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)

EVENTS_EVERY_S = 0.1
"""Progress for people: no faster than they can see."""


def node_environment(engine: str) -> Mapping[str, str]:
    """Returns the variables to start ranks with on the node where it is called, from that node's own."""
    return rank_environment(engine, process_environment())


class Denoiser:
    """Thin: the gang does the work. A broken gang fails ``check_health``, and Serve replaces the replica."""

    async def __init__(self, model: ModelConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_replica()
        self._gang = await Gang.start(
            model.denoiser,
            BuildRankParts(model=model),
            model=model.name,
            environment=partial(node_environment, model.denoiser.engine),
        )

    async def denoise(
        self, job_id: str, request: MediaRequest, encoded: list[ray.ObjectRef[Encoded]], exclusive: bool = False
    ) -> AsyncGenerator[tuple[JobEvent, ...]]:
        """Steps, previews and at last ``JobDone``. Closing the iterator cancels the job on all ranks.

        Steps come in groups, ``EVENTS_EVERY_S`` apart: each group is a millisecond's work in two processes.
        ``encoded`` is a list of one reference, so that this call need not wait for the encoder to be sent.
        ``exclusive``: beside no other job, as a request runs whose gang broke under it.
        """
        job = Job(
            job_id=job_id,
            request=request,
            conditioning=(await encoded[0]).conditioning,
            num_steps=request.num_inference_steps,
            preview_steps=frozenset(request.preview_steps),
            shape=(request.width, request.height, request.num_frames, request.true_cfg_scale > 1),
            exclusive=exclusive,
            request_id=request.request_id,
        )
        logger.info("job is queued", extra=job.log_fields)
        async with aclosing(self._gang.submit_grouped(job, every_s=EVENTS_EVERY_S)) as groups:
            async for group in groups:
                yield group

    async def metrics(self) -> Counted:
        """Returns this replica's name, and what it has counted."""
        return counted_here()

    async def check_health(self) -> None:
        await self._gang.check_health()

    async def __del__(self) -> None:
        """Serve awaits it when a replica is stopped: engines are released before communicators, then ranks end."""
        gang = getattr(self, "_gang", None)
        if gang is not None:
            await gang.close()
