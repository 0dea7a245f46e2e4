"""One poll of the database serves all watchers of clips."""

from __future__ import annotations

import asyncio

from deployments.clips.clips import Clips
from deployments.clips.database import ClipRecord


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
