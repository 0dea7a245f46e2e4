"""The data directory refuses writes while clips wait and run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, exc

from deployments.clips.storage import ClipFolders, StorageLostError
from deployments.http.errors import from_failure
from tests.deployments.clips.support.runs import QUICK, REQUEST, ended, problem_now, running, started, the
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("each_database")


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Let the kernel refuse all work in ``folder`` for every user: a file takes its place."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.touch()
    yield
    folder.unlink()
    aside.rename(folder)


async def test_a_folder_that_refuses_files_costs_no_attempt(tmp_path: Path) -> None:
    """It acts like one that becomes read-only: the running clip and the waiting one are both made later."""
    service = FakeService(permits=asyncio.Semaphore(0))
    async with running(service, tmp_path, max_concurrent_videos=1) as clips:
        first, second = [await clips.submit(REQUEST, "1") for _ in range(2)]
        await started(service)
        with refusing(tmp_path / "videos"):
            assert "cannot be used: Not a directory" in str(await problem_now(clips))
            with pytest.raises(StorageLostError):
                await clips.submit(REQUEST, "1")
            service.permit(REQUEST.num_inference_steps * 9)
            async with asyncio.timeout(PATIENCE_S):
                while (await the(clips, first.id)).status != "queued":
                    await asyncio.sleep(0.01)
            await asyncio.sleep(QUICK["retry_s"] + 4 * QUICK["poll_s"])  # time to make another mistake
            assert [(await the(clips, one.id)).attempts for one in (first, second)] == [0, 0]
            assert len(service.performed) == 1, "no step without storage"
        for one in (first, second):
            record = await ended(clips, one.id)
            assert (record.status, record.attempts) == ("completed", 1)


async def test_a_read_only_database_costs_no_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite acts as on a read-only file system, PostgreSQL as a stand-by server."""
    service, queries_only = FakeService(permits=asyncio.Semaphore(0)), [False]
    async with running(service, tmp_path) as clips:
        engine = clips._store.engine.sync_engine

        def begin(connection: Connection) -> None:
            kind = "ONLY" if queries_only[0] else "WRITE"
            postgres, sqlite = f"SET TRANSACTION READ {kind}", f"PRAGMA query_only = {queries_only[0]:d}"
            connection.exec_driver_sql(sqlite if connection.dialect.name == "sqlite" else postgres)

        event.listen(engine, "begin", begin)
        record = await clips.submit(REQUEST, "1")
        await started(service)
        queries_only[0] = True
        with pytest.raises(exc.DBAPIError, match=r"readonly database|read-only transaction") as raised:
            await clips.submit(REQUEST, "1")
        answer = from_failure(raised.value)
        assert answer is not None
        assert (answer.status, answer.code) == (503, "storage_unavailable")
        service.permit(REQUEST.num_inference_steps * 9)
        async with asyncio.timeout(PATIENCE_S):
            while "waits for the data directory" not in caplog.text:
                await asyncio.sleep(0.01)
        queries_only[0] = False
        record = await ended(clips, record.id)
    assert (record.status, record.attempts) == ("completed", 1)


def test_a_fault_of_one_file_is_not_the_place_s(tmp_path: Path) -> None:
    folders = ClipFolders(root=tmp_path)
    with pytest.raises(OSError, match="File name too long"):
        folders.write("a" * 300, "video", b"")
