"""Durable clips: the interface that the API calls, with the runner inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from deployments.asyncio_tools import OneThread, cancel, finish, to_the_end
from deployments.clips.attempt import Attempt
from deployments.clips.database import FILE_GONE, ClipError, ClipRecord
from deployments.clips.deliveries import WebhookSender
from deployments.clips.eta import clip_times, learn_clip, nums_before, predicted_ends_s
from deployments.clips.objects import Bucket, ClipObjects, StoredObject
from deployments.clips.runner import ClipRunner
from deployments.clips.settings import ClipSettings
from deployments.clips.storage import (
    UNAVAILABLE,
    ClipFolders,
    StorageFullError,
    StorageLostError,
    Variant,
    storage_problem,
)
from deployments.clips.store import Claim, Claims, ClipStore, new_clip_id
from deployments.clips.webhooks import Webhook
from deployments.database.database import Database
from deployments.places import PRIVATE_FILE, close_to_others, make_folder
from deployments.service.interface import Service
from engines.gang.errors import QueueFullError
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest

logger = logging.getLogger("troupe.clips")

SWEEP_EVERY_S = 60.0
NUM_LEARNT_FROM = 100
DISK_CHECK_TIMEOUT_S = 5.0
"""Timeout of the disk check; a network disk may never answer."""


class Clips:
    """Clips that are made in the background, between ``start`` and ``stop``.

    Several processes may share one database and data directory; each clip has one runner.
    """

    def __init__(self, service: Service, settings: ClipSettings) -> None:
        self._service = service
        self._settings = settings
        self.bucket = Bucket(settings.storage) if settings.storage else None
        """Place of files, unless they are in the data directory."""
        folders = ClipFolders(root=settings.data_dir / "videos")
        self._folders = folders if self.bucket is None else ClipObjects(bucket=self.bucket)
        self.database = Database(settings.url)
        self._times = clip_times()
        self._tasks: list[asyncio.Task[None]] = []
        self._submitting = asyncio.Lock()
        self._disk = OneThread(lambda: storage_problem(settings.data_dir) or self._folders.problem())

    async def start(self) -> None:
        """Open the database and resume unfinished clips. ValueError for a bad database URL."""
        await asyncio.to_thread(self._make_folders)
        await self.database.open()
        self._store = ClipStore(engine=self.database.engine)
        self._claims = Claims(store=self._store, lease_s=self._settings.lease_s)
        await self._learn()

        limits = self._settings
        self._runner = ClipRunner(
            self._service,
            self._claims,
            self._attempt,
            self.storage_problem,
            max_running=limits.max_concurrent_videos,
            poll_s=limits.poll_s,
        )
        self._sender = WebhookSender(self.database, limits.webhooks, limits.poll_s)
        work = (self._runner.run(), self._sender.run(), self._sweep())
        self._tasks = [asyncio.create_task(one) for one in work]

    def _make_folders(self) -> None:
        make_folder(self._settings.data_dir)
        self._folders.prepare()
        if not self._settings.database_url:
            for ending in ("", "-wal", "-shm"):
                close_to_others(Path(f"{self._settings.database_file}{ending}"), PRIVATE_FILE)

    async def stop(self) -> None:
        """Stop and requeue all clips in progress. Only their steps are lost."""
        await cancel(*self._tasks)
        if self._tasks:
            await self._runner.stop_all()  # also clips that began after an earlier stop
        await self.database.close()

    async def submit(
        self,
        request: MediaRequest,
        seconds: str,
        key_hash: str = "",
        pictures: InputPictures = NO_PICTURES,
        webhook: Webhook | None = None,
    ) -> ClipRecord:
        """Queue a clip made from ``pictures`` for the key ``key_hash``. ``webhook`` hears of its end.

        QueueFullError if ``max_waiting_videos`` are queued; StorageFullError, StorageLostError.
        """
        await self._check_storage()
        async with self._submitting:  # concurrent submissions count each other
            num_waiting = await self._store.num_waiting()
            if num_waiting >= self._settings.max_waiting_videos:
                raise QueueFullError(num_waiting, retry_after_s=self._settings.lease_s)
            async with self._new_clip(pictures) as clip_id:
                clip = await self._store.create(request, seconds, key_hash, clip_id, webhook=webhook)
                clip = await self._with_prediction(clip)
        self._runner.wake()
        return clip

    async def begin(
        self,
        request: MediaRequest,
        seconds: str,
        key_hash: str = "",
        pictures: InputPictures = NO_PICTURES,
        webhook: Webhook | None = None,
    ) -> tuple[str, asyncio.Future[None]]:
        """Start a clip made from ``pictures`` at once, ahead of the queue. StorageFullError, StorageLostError.

        Return its id and a future that is done when a gang accepts the clip. If none does, the future raises the
        reason (TooLateError, QueueFullError, ValueError, …), and the caller must delete the clip.
        """
        await self._check_storage()
        async with self._new_clip(pictures) as clip_id:
            claim = await self._claims.begin(request, seconds, key_hash, clip_id, webhook)
        return clip_id, self._runner.begin(claim)

    def webhook_for(self, webhook: Webhook | None, key_hash: str) -> Webhook | None:
        """Return the webhook of a request, or else that of its key. ValueError if no message may go there."""
        if webhook is not None:
            self._settings.webhooks.check(webhook)
        return webhook or self._settings.webhooks.of_key(key_hash)

    async def get(self, clip_id: str) -> ClipRecord | None:
        clip = await self._store.get(clip_id)
        return None if clip is None else await self._with_prediction(clip)

    async def get_all(self, clip_ids: Collection[str]) -> dict[str, ClipRecord]:
        """Return the existing clips among ``clip_ids``, by id."""
        clips = await self._store.get_all(clip_ids)
        return {clip.id: clip for clip in await self._with_predictions(clips.values())}

    async def page(
        self, *, after: ClipRecord | None, limit: int, ascending: bool, key_hash: str | None = None
    ) -> tuple[list[ClipRecord], bool]:
        """Return up to ``limit`` clips behind ``after``, of one key unless it is None, and whether there are more."""
        clips = await self._store.page(after=after, limit=limit + 1, ascending=ascending, key_hash=key_hash)
        return await self._with_predictions(clips[:limit]), len(clips) > limit

    async def num_open(self, key_hash: str) -> int:
        """Return how many clips of a key are queued or in progress, over all processes."""
        return await self._store.num_open(key_hash)

    async def delete(self, clip_id: str) -> bool:
        """Stop the clip and delete its files and record. Return whether it existed.

        Files go first: on a full disk they make room for the database.
        """
        if await self._store.get(clip_id) is None:
            return False
        await asyncio.to_thread(self._folders.remove, clip_id)
        was_there = await self._store.delete(clip_id)
        await self._runner.stop_clip(clip_id)
        await asyncio.to_thread(self._folders.remove, clip_id)
        return was_there

    async def file(self, clip_id: str, variant: Variant) -> Path | StoredObject | None:
        """Return a clip's file, None without one. StorageLostError if all files are out of reach."""
        return await asyncio.to_thread(self._folders.find, clip_id, variant)

    async def note_lost(self, clip_id: str) -> ClipRecord | None:
        """Mark a completed clip whose file is gone as failed. Return its current record, None if it was deleted."""
        message = "The clip was finished, and its file is gone from the server's disk: make it again with the same seed"
        if await self._store.fail_completed(clip_id, ClipError(code=FILE_GONE, message=message)):
            logger.error("the file of a clip is gone", extra={"clip_id": clip_id})
        return await self._store.get(clip_id)

    async def storage_problem(self) -> StorageFullError | StorageLostError | None:
        """Return why no clip can be stored now, None if it can. At most one thread waits for the disk."""
        try:
            return await self._disk.answer(DISK_CHECK_TIMEOUT_S)
        except TimeoutError:
            return StorageLostError(
                f"{self._settings.storage or f'the disk of {self._settings.data_dir}'} does not answer"
            )

    def _attempt(self, claim: Claim) -> Attempt:
        return Attempt(
            service=self._service,
            claims=self._claims,
            folders=self._folders,
            settings=self._settings,
            times=self._times,
            claim=claim,
        )

    async def _check_storage(self) -> None:
        if problem := await self.storage_problem():
            raise problem

    @asynccontextmanager
    async def _new_clip(self, pictures: InputPictures) -> AsyncIterator[str]:
        """Yield the id of a new clip whose ``pictures`` are on disk. Delete all of it if the block fails."""
        clip_id = new_clip_id()
        try:
            if pictures.num_bytes:
                await finish(asyncio.to_thread(self._folders.write_inputs, clip_id, pictures))
            yield clip_id
        except BaseException:  # also if the client disconnects: it never got the id
            with suppress(*UNAVAILABLE):
                await to_the_end(self._undo(clip_id))
            raise

    async def _undo(self, clip_id: str) -> None:
        """Delete a clip without an answer. The record goes first: while it is there, its inputs are."""
        await self._store.delete(clip_id)
        await asyncio.to_thread(self._folders.remove, clip_id)

    async def _learn(self) -> None:
        """Learn durations from the newest finished clips in the database."""
        for clip in reversed(await self._store.page(after=None, limit=NUM_LEARNT_FROM, ascending=False)):
            if clip.timings is not None:
                learn_clip(self._times, clip.request, clip.timings)

    async def _with_prediction(self, clip: ClipRecord) -> ClipRecord:
        return (await self._with_predictions([clip]))[0]

    async def _with_predictions(self, clips: Collection[ClipRecord]) -> list[ClipRecord]:
        """Return ``clips``; add queue position and predicted end to those that are queued."""
        models = {clip.request.model for clip in clips if clip.status == "queued"}
        queue = await self._store.open_clips(models) if models else []
        ends_s = predicted_ends_s(queue, self._times, self._settings.num_gangs, time.time())
        before = nums_before(queue)
        return [
            replace(clip, eta_at_s=ends_s.get(clip.id), num_before=before.get(clip.id))
            if clip.status == "queued"
            else clip
            for clip in clips
        ]

    async def _sweep(self) -> None:
        keep_s = self._settings.keep_videos_s
        orphans = self._folders.orphans(self._settings.orphan_s)
        while True:
            try:
                if keep_s is not None:
                    for clip_id in await self._store.finished_before(time.time() - keep_s):
                        await self.delete(clip_id)
                await self._sender.sweep()
                clip_ids = await asyncio.to_thread(orphans.folders)
                await asyncio.to_thread(orphans.sweep, await self._store.unknown(clip_ids) if clip_ids else set())
            except Exception:
                logger.exception("old clips could not be deleted")
            await asyncio.sleep(min(SWEEP_EVERY_S, keep_s or SWEEP_EVERY_S, self._settings.orphan_s))
