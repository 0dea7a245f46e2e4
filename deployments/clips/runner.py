"""Claim queued and orphaned clips and run several concurrently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from deployments.asyncio_tools import cancel, taken
from deployments.clips.attempt import Attempt
from deployments.clips.store import Claim, Claims
from deployments.observability.logs import request_context
from deployments.service.interface import Service

logger = logging.getLogger("troupe.clips")


class ClipRunner:
    """Runs up to ``max_running`` claimed clips, and clips of ``begin``; claims none during a storage problem."""

    def __init__(
        self,
        service: Service,
        claims: Claims,
        attempt: Callable[[Claim], Attempt],
        storage_problem: Callable[[], Awaitable[Exception | None]],
        *,
        max_running: int,
        poll_s: float,
    ) -> None:
        self._service = service
        self._claims = claims
        self._attempt = attempt
        self._storage_problem = storage_problem
        self._max_running = max_running
        self._poll_s = poll_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._additional: set[str] = set()
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        """Look for a clip to claim now."""
        self._wakeup.set()

    async def stop_clip(self, clip_id: str) -> None:
        """Cancel the clip on its ranks, if it runs here, and wait for the end."""
        if task := self._running.get(clip_id):
            await cancel(task)

    async def run(self) -> None:
        """Claim and start clips until cancelled."""
        while True:
            await self._claim_free_slots()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):  # wait_for can swallow a cancellation in Python 3.11
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def stop_all(self) -> None:
        """Cancel and requeue all clips that run here; wait for the end."""
        await cancel(*self._running.values())

    async def _claim_free_slots(self) -> None:
        try:
            while len(self._running) - len(self._additional) < self._max_running:
                if await self._storage_problem():
                    return
                not_ready = await self._service.not_ready()
                ready = [name for name in self._service.cards() if name not in not_ready]
                claim = await taken(self._take(ready), self._give_back)
                if claim is None:
                    return
                self._start(self._attempt(claim))
        except Exception:  # the database or a deployment may be unavailable for a while
            logger.exception("no clip could be claimed")

    async def _take(self, models: Collection[str]) -> Claim | None:
        """Claim a clip. If its claim here expired while this process slept, end that attempt: the new claim counts."""
        claim = await self._claims.take(models)
        if claim is not None:
            await self.stop_clip(claim.clip.id)
        return claim

    async def _give_back(self, claim: Claim) -> None:
        await self._claims.give_back(claim, wait_s=0, counts=False)

    def begin(self, claim: Claim) -> asyncio.Future[None]:
        """Start a new clip in addition. Return a future: done once a gang accepts it, or raising the reason."""
        attempt = self._attempt(claim)
        attempt.admission = asyncio.get_running_loop().create_future()
        self._additional.add(claim.clip.id)
        self._start(attempt)
        return attempt.admission

    def _start(self, attempt: Attempt) -> None:
        clip = attempt.claim.clip
        with request_context(clip.request.request_id):
            task = asyncio.create_task(attempt.run())
        self._running[clip.id] = task
        task.add_done_callback(lambda task: self._remove(clip.id, task))

    def _remove(self, clip_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(clip_id) is task:
            del self._running[clip_id]
            self._additional.discard(clip_id)
        if not task.cancelled() and (failure := task.exception()):
            logger.error("the outcome of a clip could not be written", exc_info=failure, extra={"clip_id": clip_id})
        self._wakeup.set()
