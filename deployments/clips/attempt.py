"""One attempt at one clip: perform the request, renew the claim, record the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from deployments.asyncio_tools import EndedError, finish, to_the_end, unless
from deployments.clips.database import ClipError
from deployments.clips.eta import learn_clip
from deployments.clips.objects import ClipObjects
from deployments.clips.settings import ClipSettings
from deployments.clips.storage import UNAVAILABLE, ClipFolders, Variant, is_full, is_lost
from deployments.clips.store import Claim, Claims
from deployments.requests.request_errors import is_user_error
from deployments.requests.rules import check_kept
from deployments.service.interface import (
    Media,
    ModelUnavailableError,
    Output,
    Preview,
    Progress,
    Queued,
    Service,
    StageTimes,
)
from engines.core.engine import JobFailedError
from engines.gang import errors
from engines.gang.errors import GangBrokenError, QueueFullError, TooLateError
from engines.gang.eta.measured_times import MeasuredTimes
from pipelines.request import NO_PICTURES, InputPictures
from pipelines.wording import counted

logger = logging.getLogger("troupe.clips")


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One run of a claimed clip's request, with its progress."""

    service: Service
    """Makes the clip."""
    claims: Claims
    """Store of progress and end."""
    folders: ClipFolders | ClipObjects
    """Store of the file."""
    settings: ClipSettings
    """Intervals and number of attempts."""
    times: MeasuredTimes
    """Durations of similar clips, which it adds to."""
    claim: Claim
    """The clip, and the lease on it."""
    admission: asyncio.Future[None] | None = None
    """Done once a gang accepts the clip. Raises, in place of a failed record, if none does."""
    progress: int = field(default=0, init=False)
    """0 to 99."""
    num_previews: int = field(default=0, init=False)
    """Previews written so far."""
    eta_at_s: float | None = field(default=None, init=False)
    """Predicted end in Unix seconds."""
    gpu_s: float | None = field(default=None, init=False)
    """GPU seconds of the attempt so far; None before the gang reports any."""
    _decode_s: float | None = field(default=None, init=False)
    """Predicted seconds from the last step to the file; None: unknown."""
    _made_s: float = field(default_factory=lambda: time.monotonic(), init=False)
    """Begin of the attempt, by the monotonic clock."""

    async def run(self) -> None:
        """Make the clip or record its failure. On cancellation, requeue the clip and raise."""
        clip = self.claim.clip
        if clip.attempts > self.settings.max_attempts:
            times = counted(clip.attempts - 1, "time", "times")
            message = f"The application ended {times} while this clip was made; it is not tried again"
            await self._fail(ClipError(code="gave_up", message=message))
            return
        try:
            media = await unless(self._make(), self._keep_claim())
            await self._finish(media)
        except EndedError:
            logger.info("clip was deleted or taken over", extra={"clip_id": clip.id})
            await self._clean()
        except asyncio.CancelledError:
            await to_the_end(self.claims.give_back(self.claim, wait_s=0, counts=False))
            raise
        except Exception as failure:
            if self.admission is None or self.admission.done():
                await self._handle(failure)
            else:
                self.admission.set_exception(failure)
        finally:
            self._admit()

    async def _make(self) -> Media:
        """Return the clip, whose files are written: that may take longer than a claim lasts."""
        media = await self._perform()
        await self._write("video", media.data)
        await self._write("thumbnail", media.thumbnail)
        return media

    async def _perform(self) -> Media:
        clip, owner = self.claim.clip, self.claim.owner
        if card := self.service.cards().get(clip.request.model):
            check_kept(clip.request, card)
        request = replace(
            clip.request,
            request_id=f"{clip.request.request_id}-{owner[:8]}",
            waited_s=clip.request.waited_s + self._age_s,
        )
        pictures, start_s = await self._inputs(), time.time()
        async with aclosing(self.service.perform(request, Output(format="mp4"), pictures)) as events:
            async for event in events:
                match event:
                    case Media():
                        return event
                    case Queued():
                        self.eta_at_s = None if event.eta_s is None else start_s + event.eta_s
                        self._decode_s = event.decode_s
                        await self._report()
                        self._admit()
                    case Progress():
                        self.gpu_s = event.gpu_s
                        self.progress = min(99, 100 * event.step // event.num_steps)
                        if event.eta_s is not None and self._decode_s is not None:
                            self.eta_at_s = time.time() + event.eta_s + self._decode_s
                    case Preview():
                        await self._write("preview", event.data)
                        self.num_previews = event.index + 1
        raise RuntimeError("the service ended without a clip")

    async def _write(self, variant: Variant, data: bytes) -> None:
        """Write a file. It is not cut short: what follows may delete the folder."""
        await finish(asyncio.to_thread(self.folders.write, self.claim.clip.id, variant, data))

    @property
    def _age_s(self) -> float:
        """Seconds since the request: monotonic for clips that began here, wall clock for those of the database."""
        if self.admission is not None:
            return time.monotonic() - self._made_s
        return max(0.0, time.time() - self.claim.clip.created_at_s)

    async def _inputs(self) -> InputPictures:
        """Return the input pictures. ValueError if they are gone: a retry would not find them."""
        clip = self.claim.clip
        if not clip.request.num_pictures and not clip.request.num_video_frames:
            return NO_PICTURES
        try:
            return await asyncio.to_thread(self.folders.read_inputs, clip.id, clip.request)
        except FileNotFoundError:
            source = "clip" if clip.request.num_video_frames else "picture"
            message = f"the input {source} of the clip is gone from the server's disk: send it again"
            raise ValueError(message) from None

    async def _keep_claim(self) -> None:
        """Report progress as it changes and renew the claim in time. Return when the claim is lost."""
        reported, due_s = (0, 0), time.monotonic() + self.claims.lease_s / 3
        while True:
            await asyncio.sleep(self.settings.progress_s)
            current = (self.progress, self.num_previews)
            if current == reported and time.monotonic() < due_s:
                continue
            is_held = await self._report()
            if is_held is False:
                return
            if is_held:
                reported, due_s = current, time.monotonic() + self.claims.lease_s / 3

    async def _report(self) -> bool | None:
        """Record the progress. Return False if the claim is lost, None if the database cannot be written."""
        try:
            return await self.claims.report(self.claim, self.progress, self.num_previews, self.eta_at_s)
        except UNAVAILABLE:
            logger.warning("progress could not be written", exc_info=True, extra={"clip_id": self.claim.clip.id})
            return None

    def _admit(self) -> None:
        """Resolve ``admission``: a gang accepted the clip, or the attempt ended."""
        if self.admission is not None and not self.admission.done():
            self.admission.set_result(None)

    async def _finish(self, media: Media) -> None:
        clip_id = self.claim.clip.id
        learn_clip(self.times, self.claim.clip.request, media.timings)
        if await self._complete(media.timings):
            await asyncio.to_thread(self.folders.remove_inputs, clip_id)
        else:
            await self._clean()

    async def _complete(self, timings: StageTimes) -> bool:
        """Record the end once the database answers. Return False if the claim is lost."""
        is_told = False
        while True:
            try:
                return await self.claims.complete(self.claim, timings)
            except UNAVAILABLE as failure:
                if not is_lost(failure):
                    raise
                if not is_told:
                    self._say_waiting(failure)
                is_told = True
                await asyncio.sleep(self.settings.progress_s)

    async def _fail(self, error: ClipError) -> None:
        if await self.claims.fail(self.claim, replace(error, gpu_s=self.gpu_s)):
            await asyncio.to_thread(self.folders.remove_inputs, self.claim.clip.id)

    async def _clean(self) -> None:
        """Delete the files of a clip whose record was deleted."""
        if await self.claims.store.get(self.claim.clip.id) is None:
            await asyncio.to_thread(self.folders.remove, self.claim.clip.id)

    async def _handle(self, failure: Exception) -> None:
        clip = self.claim.clip
        error = final_error(failure)
        if error is None and isinstance(failure, QueueFullError | ModelUnavailableError):  # not the fault of the clip
            await self._queue_again(failure.retry_after_s, counts=False)
            return
        if is_lost(failure):  # not its fault either
            self._say_waiting(failure)
            await self._queue_again(self.settings.retry_s, counts=False)
            return
        fields = {"clip_id": clip.id, "attempt": clip.attempts, "reason": str(failure)}
        logger.warning("clip failed", exc_info=None if is_user_error(failure) else failure, extra=fields)
        if error is None and clip.attempts >= self.settings.max_attempts:
            error = _last_error(failure, clip.attempts)
        if error is not None:
            await self._fail(error)
        else:
            await self._queue_again(self.settings.retry_s, counts=True)

    def _say_waiting(self, failure: Exception) -> None:
        logger.warning("clip waits for the data directory", exc_info=failure, extra={"clip_id": self.claim.clip.id})

    async def _queue_again(self, wait_s: float, *, counts: bool) -> None:
        """Requeue the clip once the database can be written. ``counts``: whether this was an attempt."""
        while True:
            try:
                await self.claims.give_back(self.claim, wait_s=wait_s, counts=counts)
                return
            except UNAVAILABLE:
                await asyncio.sleep(self.settings.progress_s)


def final_error(failure: Exception) -> ClipError | None:
    """Return the error of a failure that no retry can fix; None if a retry may help."""
    match failure:
        case GangBrokenError():  # raised only after the clip was run on a second gang
            return ClipError(code="gang_broken", message=f"The ranks that worked on this clip failed: {failure}")
        case JobFailedError():
            return ClipError(code="job_failed", message=f"The model failed at this clip: {failure}")
        case TooLateError(limit=errors.DEADLINE):
            message = f"The clip is not made: {failure}"
            return ClipError(code="too_late", message=message, retry_after_s=failure.retry_after_s)
        case ValueError():
            return ClipError(code="invalid_value", message=str(failure))
    return None


def _last_error(failure: Exception, attempts: int) -> ClipError:
    if is_full(failure):
        return ClipError(
            code="storage_full",
            message=f"There was no room for the clip on the disk, {counted(attempts, 'time', 'times')}",
        )
    return ClipError(
        code="internal",
        message=f"The clip failed {counted(attempts, 'time', 'times')}, the last time with {type(failure).__name__}",
    )
