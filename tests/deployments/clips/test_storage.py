"""The disk of clips is full, or its files are gone."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, exc, text
from sqlalchemy.pool import QueuePool

from deployments.clips.clips import Clips
from deployments.clips.storage import ClipFolders, Orphans, StorageFullError, StorageLostError, storage_problem
from deployments.clips.store import Claims
from deployments.http.errors import from_failure
from tests.deployments.clips.support.runs import REQUEST, data_of, ended, failure_of, problem_now, running, started
from tests.deployments.support.fake_service import FakeService, clip
from tests.support.patience import PATIENCE_S

QUICK_S = 10.0
"""Time in which a clip without steps to wait for surely ends."""


async def finished(clips: Clips) -> str:
    record = await ended(clips, (await clips.submit(REQUEST, "1")).id)
    assert record.status == "completed"
    return record.id


async def test_a_finished_clip_whose_file_is_gone_has_failed(tmp_path: Path) -> None:
    async with running(FakeService(), tmp_path) as clips:
        clip_id = await finished(clips)
        assert await clips.file(clip_id, "video") is not None
        (tmp_path / "videos" / clip_id / "clip.mp4").unlink()
        assert await clips.file(clip_id, "video") is None
        record = await clips.note_lost(clip_id)
        assert record is not None
        assert (record.status, failure_of(record).code) == ("failed", "file_gone")
        assert await clips.delete(clip_id)
        assert await clips.note_lost(clip_id) is None


async def test_a_folder_that_is_not_mounted_costs_no_clip(tmp_path: Path) -> None:
    async with running(FakeService(), tmp_path) as clips:
        clip_id = await finished(clips)
        (tmp_path / "videos").rename(tmp_path / "elsewhere")
        with pytest.raises(StorageLostError, match="is its disk mounted"):
            await clips.file(clip_id, "video")
        (tmp_path / "elsewhere").rename(tmp_path / "videos")
        assert await data_of(clips, clip_id) == clip(REQUEST)


async def test_a_full_disk_is_told_and_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, looks = FakeService(), list[Exception | None]()

    def counted(*folders: Path) -> Exception | None:
        looks.append(storage_problem(*folders))
        return looks[-1]

    async def looked() -> None:
        """Wait for two more looks at the disk: the current one, and one that saw the present state."""
        num_looks = len(looks)
        async with asyncio.timeout(PATIENCE_S):
            while len(looks) < num_looks + 2:
                await asyncio.sleep(0.01)

    monkeypatch.setattr("deployments.clips.clips.storage_problem", counted)
    async with running(service, tmp_path) as clips:
        service.reasons["fake-clips"] = "not now"
        waiting = await clips.submit(REQUEST, "1")
        monkeypatch.setattr("deployments.clips.storage.MIN_FREE_BYTES", 1 << 62)
        assert "are needed: delete clips, or make room" in str(await problem_now(clips))
        with pytest.raises(StorageFullError):
            await clips.submit(REQUEST, "1")
        await looked()
        service.reasons.clear()
        await looked()
        assert service.performed == [], "no step without storage"
        monkeypatch.undo()
        assert await problem_now(clips) is None
        assert (await ended(clips, waiting.id)).status == "completed"


async def test_a_disk_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with running(FakeService(), tmp_path) as clips:
        monkeypatch.setattr("deployments.clips.storage.shutil.disk_usage", stale)
        assert "cannot be used: Stale file handle" in str(await problem_now(clips))
        with pytest.raises(StorageLostError):
            await clips.submit(REQUEST, "1")


async def test_a_disk_that_does_not_answer_holds_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, looks, look = threading.Event(), list[Path](), shutil.disk_usage

    def hangs(folder: Path) -> object:
        looks.append(folder)
        answers.wait(PATIENCE_S)
        return look(folder)

    async with running(FakeService(), tmp_path) as clips:
        monkeypatch.setattr("deployments.clips.clips.DISK_CHECK_TIMEOUT_S", 0.01)
        monkeypatch.setattr("deployments.clips.storage.shutil.disk_usage", hangs)
        async with asyncio.timeout(PATIENCE_S):
            while not looks:
                await clips.storage_problem()
        for problem in await asyncio.gather(*(clips.storage_problem() for _ in range(9))):
            assert "does not answer" in str(problem)
        assert len(looks) == 1
        answers.set()
        async with asyncio.timeout(PATIENCE_S):
            while await clips.storage_problem() is not None:
                await asyncio.sleep(0.01)


async def test_who_asks_side_by_side_hears_what_the_disk_says(tmp_path: Path) -> None:
    """This holds if another caller looks again before the first answer is read."""
    async with running(FakeService(), tmp_path) as clips:

        async def ask() -> list[object]:
            return [await clips.storage_problem() for _ in range(5)]

        for answers in await asyncio.gather(*(ask() for _ in range(5))):
            assert answers == [None] * 5


async def test_a_database_without_a_free_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lock may hold all of them: callers get the error, and a running clip goes on."""
    service = FakeService(permits=asyncio.Semaphore(0))
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1")
        await started(service)
        engine, num_held = clips._store.engine, 0
        pool = engine.pool
        assert isinstance(pool, QueuePool)
        pool._timeout = 0.01
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            while num_held < pool.size() + pool._max_overflow:
                with suppress(exc.TimeoutError):  # the runner holds one now and then
                    await stack.enter_async_context(engine.connect())
                    num_held += 1
            service.permit()
            while "progress could not be written" not in caplog.text:
                await asyncio.sleep(0.01)
            with pytest.raises(exc.TimeoutError) as raised:
                await clips.get(record.id)
        answer = from_failure(raised.value)
        assert answer is not None
        assert (answer.status, answer.code) == (503, "storage_unavailable")
        service.permit(REQUEST.num_inference_steps)
        record = await ended(clips, record.id)
    assert (record.status, record.attempts) == ("completed", 1)


async def test_a_database_server_that_is_away_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be opened is a StorageLostError."""
    service = FakeService(permits=asyncio.Semaphore(0))
    num_reports, is_away = 0, asyncio.Event()

    async def report(*_: object) -> bool:
        nonlocal num_reports
        num_reports += 1
        if num_reports == 3:
            is_away.set()
        raise StorageLostError("the database does not answer")

    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1")
        await started(service)
        with monkeypatch.context() as patch:
            patch.setattr(Claims, "report", report)
            service.permit()
            async with asyncio.timeout(QUICK_S):
                await is_away.wait()
        service.permit(REQUEST.num_inference_steps)
        record = await ended(clips, record.id)
    assert (record.status, record.attempts) == ("completed", 1)
    assert len(service.performed) == 1


async def test_a_clip_that_is_made_while_the_database_server_is_away_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, failures = Claims.complete, [StorageLostError("the database does not answer")]

    async def complete_once_back(*arguments: Any) -> bool:
        if failures:
            raise failures.pop()
        return await complete(*arguments)

    monkeypatch.setattr(Claims, "complete", complete_once_back)
    service = FakeService()
    async with running(service, tmp_path) as clips:
        record = await ended(clips, (await clips.submit(REQUEST, "1")).id)
    assert (record.status, record.attempts) == ("completed", 1)
    assert len(service.performed) == 1


async def test_a_clip_is_queued_again_once_the_database_server_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is away as well. Otherwise it waits until its claim ends, and an attempt is lost."""
    give_back, write = Claims.give_back, ClipFolders.write
    num_writes = num_returns = 0

    def write_once_back(*arguments: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 1:
            raise StorageLostError("the disk is gone")
        write(*arguments)

    async def give_back_once_back(*arguments: Any, **options: Any) -> bool:
        nonlocal num_returns
        num_returns += 1
        if num_returns == 1:
            raise StorageLostError("the database does not answer")
        return await give_back(*arguments, **options)

    monkeypatch.setattr(ClipFolders, "write", write_once_back)
    monkeypatch.setattr(Claims, "give_back", give_back_once_back)
    async with running(FakeService(), tmp_path) as clips, asyncio.timeout(QUICK_S):
        record = await ended(clips, (await clips.submit(REQUEST, "1")).id)
    assert (record.status, record.attempts) == ("completed", 1)


async def test_a_disk_that_fills_up_under_a_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ClipFolders, "write", write)
    async with running(FakeService(), tmp_path) as clips:
        record = await ended(clips, (await clips.submit(REQUEST, "1")).id)
    assert (record.status, failure_of(record).code, record.attempts) == ("failed", "storage_full", 3)


async def test_a_full_database_refuses_clips_and_lets_others_go(tmp_path: Path) -> None:
    """SQLite itself reports a full disk, since its file may not grow."""
    async with running(FakeService(), tmp_path) as clips:
        clip_id = await finished(clips)
        engine = clips._store.engine
        await engine.dispose()
        event.listen(engine.sync_engine, "connect", lambda connection, _: set_pages(connection))
        with pytest.raises(StorageFullError, match="the database has no room"):
            async with engine.begin() as connection:
                await connection.execute(text("CREATE TABLE too_much AS SELECT randomblob(1000000) AS x"))
        assert await clips.delete(clip_id)
        assert await clips.get(clip_id) is None


def set_pages(connection: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA max_page_count = 20")
    cursor.close()


@pytest.mark.parametrize("again", [False, True])
async def test_a_database_that_is_deleted_under_the_server_is_noticed(tmp_path: Path, again: bool) -> None:
    """This holds if another server's database takes its place."""
    async with running(FakeService(), tmp_path) as clips:
        clip_id = await finished(clips)
        for path in tmp_path.glob("jobs.sqlite3*"):
            path.unlink()
        if again:
            async with running(FakeService(), tmp_path):
                pass
        for work in (clips.get(clip_id), clips.submit(REQUEST, "1"), clips.delete(clip_id)):
            with pytest.raises(StorageLostError, match="deleted or replaced under the server"):
                await work
        assert (tmp_path / "videos" / clip_id / "clip.mp4").exists()


async def test_what_no_clip_owns_is_swept(tmp_path: Path) -> None:
    async with running(FakeService(), tmp_path) as clips:
        clip_id = await finished(clips)
    ClipFolders(root=tmp_path / "videos").write("video_without_record", "video", b"left by a crash")
    partial = tmp_path / "videos" / clip_id / ".clip.mp4.0123abcd"
    partial.write_bytes(b"half")
    async with running(FakeService(), tmp_path, orphan_s=0.2) as clips, asyncio.timeout(PATIENCE_S):
        while partial.exists() or (tmp_path / "videos" / "video_without_record").exists():
            await asyncio.sleep(0.02)
        assert await data_of(clips, clip_id) == clip(REQUEST)


def test_orphans_have_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("deployments.clips.storage.time.monotonic", lambda: now_s[0])
    orphans = Orphans(root=tmp_path, patience_s=60.0)
    for name in ("found", "lost"):
        (tmp_path / name).mkdir()
    orphans.sweep({"found", "lost"})
    now_s[0] += 59
    orphans.sweep({"lost"})
    now_s[0] += 2
    orphans.sweep({"found", "lost"})
    assert sorted(orphans.folders()) == ["found"], "a record meanwhile resets the count"


def test_a_clip_that_is_deleted_during_a_sweep_keeps_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partials = [tmp_path / name / ".clip.mp4.0123abcd" for name in ("deleted", "kept", "other")]
    for partial in partials:
        partial.parent.mkdir()
        partial.touch()
    scandir = os.scandir

    def delete_first(path: Path) -> object:
        if path == partials[0].parent:
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", delete_first)
    Orphans(root=tmp_path, patience_s=0.0).sweep(set())
    assert not any(partial.exists() for partial in partials)
