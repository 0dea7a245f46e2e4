"""Progress of clips as streams of events; one poll of the database serves all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from deployments.clips.clips import Clips
from deployments.clips.database import ClipRecord
from deployments.http.answers import Video, VideoEvent

EventName = Literal["video.progress", "video.completed", "video.failed"]
ENDS: dict[str, EventName] = {"completed": "video.completed", "failed": "video.failed"}
ETA_NOTICED, ETA_NOTICED_S = 0.1, 1.0
"""Change of the time left, as a share and in seconds, from which it is sent again."""


class ClipPoller:
    """Polls ``clips`` at most every ``poll_s``, while requests wait for a change."""

    def __init__(self, clips: Clips, poll_s: float) -> None:
        self._clips = clips
        self._poll_s = poll_s
        self._waiting: dict[str, asyncio.Future[ClipRecord | None]] = {}
        self._looking: set[asyncio.Task[None]] = set()

    async def next_poll(self, clip_id: str) -> ClipRecord | None:
        """Return the clip's record at the next poll; None if it is gone."""
        if not self._waiting:
            task = asyncio.create_task(self._look())
            self._looking.add(task)  # the event loop itself holds tasks weakly
            task.add_done_callback(self._looking.discard)
        if clip_id not in self._waiting:
            self._waiting[clip_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._waiting[clip_id])  # others wait for it as well

    async def _look(self) -> None:
        await asyncio.sleep(self._poll_s)
        waiting, self._waiting = self._waiting, {}
        try:
            clips = await self._clips.get_all(waiting)
        except Exception as failure:
            for future in waiting.values():
                future.set_exception(failure)
                future.exception()  # looked at, should the watchers be gone
            return
        for clip_id, future in waiting.items():
            future.set_result(clips.get(clip_id))


async def video_events(
    poller: ClipPoller, clip: ClipRecord | None, place: AbstractContextManager[None] | None = None
) -> AsyncGenerator[VideoEvent, None]:
    """Yield what changes about the clip, by the database: it may be made in another process.

    ``place`` is held from the first event to the last.
    """
    last_sent: Video | None = None
    sent_s = 0.0
    with place or nullcontext():
        while clip is not None:
            video = Video.of(clip)
            if clip.status in ENDS:
                yield VideoEvent(type=ENDS[clip.status], video=video)
                return
            if last_sent is None or is_news(video, last_sent, time.monotonic() - sent_s):
                yield VideoEvent(type="video.progress", video=video)
                last_sent, sent_s = video, time.monotonic()
            clip = await poller.next_poll(clip.id)
        yield VideoEvent(type="video.deleted", video=None)


def is_news(video: Video, last: Video, passed_s: float) -> bool:
    """Return whether ``video`` differs from the state sent so many seconds ago.

    Passed time alone is no difference; a noticeably different predicted end is.
    """
    if video.model_copy(update={"eta_s": last.eta_s}) != last or (video.eta_s is None) != (last.eta_s is None):
        return True
    if video.eta_s is None or last.eta_s is None:
        return False
    left_s = max(0.0, last.eta_s - passed_s)
    return abs(video.eta_s - left_s) > max(ETA_NOTICED_S, ETA_NOTICED * left_s)
