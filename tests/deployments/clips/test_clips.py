"""The runner: jobs survive restarts, are run by one, are given up when it makes no sense, and stop when told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.clips.clips import Jobs
from deployments.clips.errors import TooManyJobsError
from deployments.clips.records import Job
from deployments.clips.settings import JobSettings
from engines.gang.errors import GangBrokenError, QueueFullError
from tests.deployments.clips.test_claims import REQUEST as BASE
from tests.deployments.support.fake_studio import FakeStudio, clip

REQUEST = replace(BASE, model="fake-clips", seed=77)
QUICK = {"poll_s": 0.05, "progress_s": 0.02, "retry_s": 0.02, "lease_s": 10.0}


@asynccontextmanager
async def running(studio: FakeStudio, folder: Path, **settings: object) -> AsyncIterator[Jobs]:
    jobs = Jobs(studio, JobSettings(data_dir=folder, **(QUICK | settings)))
    await jobs.start()
    try:
        yield jobs
    finally:
        await jobs.stop()


async def ended(jobs: Jobs, job_id: str, timeout_s: float = 8.0) -> Job:
    async with asyncio.timeout(timeout_s):
        while (job := await jobs.get(job_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return job


async def started(studio: FakeStudio, num_jobs: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(studio.performed) < num_jobs:
            await asyncio.sleep(0.01)


async def test_stop_and_start_again(tmp_path, database_url):
    studio = FakeStudio(step_s=0.1)
    async with running(studio, tmp_path, database_url=database_url) as jobs:
        job = await jobs.submit(REQUEST, "1")
        await started(studio)
    assert len(studio.closed) == 1
    second = FakeStudio()
    async with running(second, tmp_path, database_url=database_url) as jobs:
        assert (await ended(jobs, job.id)).status == "completed"
        assert jobs.file(job.id, "video").read_bytes() == clip(REQUEST)
        assert (await jobs.get(job.id)).attempts == 1  # a restart is no failure
    assert second.performed[0].seed == 77


KILLED = """
    import asyncio, os, pathlib, sys
    sys.path.insert(0, {root!r})
    from tests.deployments.support.fake_studio import FakeStudio
    from tests.deployments.clips.test_clips import REQUEST, running

    def die(request, step):
        if step == 3:
            os.kill(os.getpid(), 9)

    async def main():
        async with running(FakeStudio(at_step=die), pathlib.Path({folder!r}), lease_s=0.5) as jobs:
            await jobs.submit(REQUEST, "1")
            await asyncio.sleep(30)

    asyncio.run(main())
"""


async def test_kill_9_in_the_middle_of_a_job(tmp_path):
    root = str(Path(__file__).parents[3])
    code = textwrap.dedent(KILLED.format(root=root, folder=str(tmp_path)))
    process = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], timeout=60)
    assert process.returncode == -9
    studio = FakeStudio()
    async with running(studio, tmp_path) as jobs:
        (job,), _ = await jobs.page(after=None, limit=10, ascending=True)
        assert job.status == "in_progress"
        job = await ended(jobs, job.id)
        assert (job.status, job.attempts) == ("completed", 2)
        assert jobs.file(job.id, "video").read_bytes() == clip(REQUEST)


async def test_two_runners_share_the_work_and_no_job(tmp_path, database_url):
    first, second = FakeStudio(step_s=0.02), FakeStudio(step_s=0.02)
    url = {"database_url": database_url}
    async with running(first, tmp_path, **url) as one, running(second, tmp_path, **url) as two:
        ids = [(await one.submit(replace(REQUEST, seed=seed), "1")).id for seed in range(12)]
        jobs = [await ended(two, job_id) for job_id in ids]
    assert {job.status for job in jobs} == {"completed"}
    seeds = [request.seed for request in first.performed + second.performed]
    assert sorted(seeds) == list(range(12))
    assert first.performed
    assert second.performed


async def test_long_job_keeps_its_claim(tmp_path):
    first, second = FakeStudio(step_s=1), FakeStudio()
    async with running(first, tmp_path, lease_s=2) as one:
        job = await one.submit(REQUEST, "1")
        await started(first)
        async with running(second, tmp_path, lease_s=2):
            assert (await ended(one, job.id)).status == "completed"
    assert second.performed == []


async def test_deleted_by_another_replica(tmp_path):
    first, idle = FakeStudio(step_s=0.2), FakeStudio(reasons={"fake-clips": "takes no job"})
    async with running(first, tmp_path) as one, running(idle, tmp_path) as two:
        job = await one.submit(replace(REQUEST, num_inference_steps=100), "1")
        await started(first)
        assert await two.delete(job.id)
        start_s = time.monotonic()
        while not first.closed:
            await asyncio.sleep(0.01)
        assert time.monotonic() - start_s < 5  # with the next report, not at the end of the job
        async with asyncio.timeout(5):
            while (tmp_path / "videos" / job.id).exists():
                await asyncio.sleep(0.02)
        assert not await one.delete(job.id)


class Failing(FakeStudio):
    """Raises each of ``failures`` once, then works."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.before = self.fail

    def fail(self, request):
        if self.failures:
            raise self.failures.pop(0)


async def outcome(studio: FakeStudio, folder: Path) -> Job:
    async with running(studio, folder) as jobs:
        return await ended(jobs, (await jobs.submit(REQUEST, "1")).id)


async def test_tried_again_after_a_passing_failure(tmp_path):
    job = await outcome(Failing(RuntimeError("x"), QueueFullError(9, 0.05), OSError("y")), tmp_path)
    assert (job.status, job.attempts, job.error) == ("completed", 3, None)


@pytest.mark.parametrize(
    ("failures", "code", "attempts", "message"),
    [
        ([GangBrokenError("rank 1 died")], "gang_broken", 1, "rank 1 died"),
        ([ValueError("prompt has 900 tokens")], "invalid_value", 1, "900 tokens"),
        ([RuntimeError("secret")] * 3, "internal", 3, "failed 3 times, the last time with RuntimeError"),
    ],
)
async def test_given_up(tmp_path, failures, code, attempts, message):
    job = await outcome(Failing(*failures), tmp_path)
    assert (job.status, job.error.code, job.attempts) == ("failed", code, attempts)
    assert message in job.error.message
    assert "secret" not in job.error.message


async def test_job_that_kills_the_application(tmp_path):
    """Its claim runs out again and again without an outcome."""
    studio = FakeStudio()
    async with running(studio, tmp_path, lease_s=0.2) as jobs:
        studio.reasons["fake-clips"] = "not now"
        job = await jobs.submit(REQUEST, "1")
        claims = jobs._runner._claims
        for _ in range(3):
            claim = await claims.take(["fake-clips"])
            assert claim is not None
            await asyncio.sleep(0.25)
        studio.reasons.clear()
        job = await ended(jobs, job.id)
    assert (job.status, job.error.code) == ("failed", "gave_up")
    assert "3 times" in job.error.message
    assert studio.performed == []


async def test_models_that_are_not_ready_wait(tmp_path):
    studio = FakeStudio(reasons={"fake-clips": "loading"})
    async with running(studio, tmp_path) as jobs:
        job = await jobs.submit(REQUEST, "1")
        await asyncio.sleep(0.3)
        assert (await jobs.get(job.id)).status == "queued"
        studio.reasons.clear()
        assert (await ended(jobs, job.id)).status == "completed"


async def test_queue_limit(tmp_path):
    studio = FakeStudio(reasons={"fake-clips": "loading"})
    async with running(studio, tmp_path, max_waiting_videos=2) as jobs:
        for _ in range(2):
            await jobs.submit(REQUEST, "1")
        with pytest.raises(TooManyJobsError, match="2 jobs are waiting"):
            await jobs.submit(REQUEST, "1")


async def test_side_by_side_up_to_the_limit(tmp_path):
    studio = FakeStudio(step_s=0.1)
    async with running(studio, tmp_path, max_concurrent_videos=2) as jobs:
        for _ in range(3):
            await jobs.submit(REQUEST, "1")
        await started(studio, 2)
        await asyncio.sleep(0.2)
        assert len(studio.performed) == 2


async def test_old_jobs_are_swept(tmp_path):
    async with running(FakeStudio(), tmp_path, keep_videos_s=2.0) as jobs:
        job = await jobs.submit(REQUEST, "1")
        await ended(jobs, job.id)
        assert jobs.file(job.id, "thumbnail").read_bytes()
        async with asyncio.timeout(10):
            while await jobs.get(job.id) or list((tmp_path / "videos").iterdir()):
                await asyncio.sleep(0.05)


async def test_a_database_that_is_away_for_a_while(tmp_path, monkeypatch):
    studio = FakeStudio()
    async with running(studio, tmp_path) as jobs:
        calls = 0

        async def not_ready():
            nonlocal calls
            calls += 1
            if calls < 3:
                raise OSError("away")
            return {}

        monkeypatch.setattr(studio, "not_ready", not_ready)
        job = await jobs.submit(REQUEST, "1")
        assert (await ended(jobs, job.id)).status == "completed"
