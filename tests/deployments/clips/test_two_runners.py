"""With two runners on one database each clip is made by one of them, and either can stop it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.clips.storage import ClipFolders, Variant
from deployments.clips.store import Claims
from tests.deployments.clips.support.runs import REQUEST, Looking, ended, running, started, the
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

QUICK_S = 5.0
"""Time in which a runner surely reports."""

pytestmark = pytest.mark.usefixtures("each_database")


async def test_two_runners_share_the_work_and_no_clip(tmp_path: Path, database_url: str) -> None:
    permits = asyncio.Semaphore(0)
    first, second = FakeService(permits=permits), FakeService(permits=permits)
    url = {"database_url": database_url}
    async with running(first, tmp_path, **url) as one, running(second, tmp_path, **url) as two:
        ids = [(await one.submit(replace(REQUEST, seed=seed), "1")).id for seed in range(12)]
        await started(first)
        await started(second)
        first.permits = second.permits = None
        for _ in range(12 * REQUEST.num_inference_steps):
            permits.release()
        clips = [await ended(two, clip_id) for clip_id in ids]
    assert {record.status for record in clips} == {"completed"}
    seeds = [request.seed for request in first.performed + second.performed]
    assert sorted(seeds) == list(range(12))
    assert first.performed
    assert second.performed


async def test_long_clip_keeps_its_claim(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Each step takes most of a claim's time, and then another runner looks for clips."""
    permits, num_steps = asyncio.Semaphore(0), REQUEST.num_inference_steps
    first, second = FakeService(permits=permits), Looking()
    async with running(first, tmp_path, lease_s=10.0) as one, asyncio.timeout(PATIENCE_S):
        record = await one.submit(REQUEST, "1")
        await started(first)
        async with running(second, tmp_path, lease_s=10.0):
            for step in range(1, num_steps + 1):
                clock.now_s += 6.0
                await second.looked()
                permits.release()
                while (await the(one, record.id)).progress < 100 * step // num_steps:
                    await asyncio.sleep(0.01)
            assert (await ended(one, record.id)).status == "completed"
    assert second.performed == []


async def test_a_clip_keeps_its_claim_while_its_file_is_written(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object storage may take longer for a large file than a claim lasts."""
    is_written, is_renewed, was_renewed = threading.Event(), threading.Event(), list[bool]()
    report, write = Claims.report, ClipFolders.write

    async def renew(*arguments: Any) -> bool:
        is_held = await report(*arguments)
        if is_written.is_set():
            is_renewed.set()
        return is_held

    def write_slowly(folders: ClipFolders, clip_id: str, variant: Variant, data: bytes) -> None:
        if variant == "video":
            is_written.set()
            was_renewed.append(is_renewed.wait(QUICK_S))
        write(folders, clip_id, variant, data)

    monkeypatch.setattr(Claims, "report", renew)
    monkeypatch.setattr(ClipFolders, "write", write_slowly)
    async with running(FakeService(), tmp_path, lease_s=0.03) as clips:
        record = await clips.submit(REQUEST, "1")
        assert (await ended(clips, record.id)).status == "completed"
    assert was_renewed == [True]


async def test_a_clip_that_is_deleted_while_a_file_is_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write, calls = threading.Event(), threading.Event(), list[str]()
    write, remove = ClipFolders.write, ClipFolders.remove

    def write_slowly(folders: ClipFolders, clip_id: str, variant: Variant, data: bytes) -> None:
        is_writing.set()
        may_write.wait(PATIENCE_S)
        write(folders, clip_id, variant, data)
        calls.append("written")

    def remove_counted(folders: ClipFolders, clip_id: str) -> None:
        remove(folders, clip_id)
        calls.append("removed")

    monkeypatch.setattr(ClipFolders, "write", write_slowly)
    monkeypatch.setattr(ClipFolders, "remove", remove_counted)
    async with running(FakeService(), tmp_path) as clips:
        record = await clips.submit(REQUEST, "1")
        await asyncio.to_thread(is_writing.wait, PATIENCE_S)
        asyncio.get_running_loop().call_later(0.2, may_write.set)
        assert await clips.delete(record.id)
        await asyncio.to_thread(may_write.wait, PATIENCE_S)
    assert calls == ["removed", "written", "removed"]
    assert not (tmp_path / "videos" / record.id).exists()


async def test_deleted_by_another_replica(tmp_path: Path) -> None:
    first, idle = FakeService(step_s=0.5), FakeService(reasons={"fake-clips": "takes no clip"})
    async with running(first, tmp_path) as one, running(idle, tmp_path) as two:
        record = await one.submit(replace(REQUEST, num_inference_steps=100), "1")  # ends by itself after 50 s
        await started(first)
        assert await two.delete(record.id)
        async with asyncio.timeout(PATIENCE_S):
            while not first.closed + first.finished:
                await asyncio.sleep(0.01)
        assert first.finished == [], "with the next report, not at the end of the clip"
        async with asyncio.timeout(PATIENCE_S):
            while (tmp_path / "videos" / record.id).exists():
                await asyncio.sleep(0.02)
        assert not await one.delete(record.id)
