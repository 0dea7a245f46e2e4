"""With two runners on one database each clip is made by one of them, and either can stop it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.deployments.clips.support.runs import REQUEST, Looking, ended, running, started, the
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

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
