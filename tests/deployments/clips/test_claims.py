"""Records and claims, on real databases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from deployments.clips.claims import Claims
from deployments.clips.database import open_database
from deployments.clips.records import JobError
from deployments.clips.store import JobStore
from deployments.studio.interface import Timings
from pipelines.request import MediaRequest

REQUEST = MediaRequest(
    request_id="r",
    model="clips",
    kind="video",
    prompt="ein Kreis \U0001f534",
    width=32,
    height=32,
    num_frames=5,
    fps=8,
    num_inference_steps=4,
    guidance_scale=1.0,
    true_cfg_scale=5.0,
    seed=2**53 - 1,
    preview_steps=(1, 2),
)
TIMINGS = Timings(queue_s=0.1, encode_s=0.2, denoise_s=0.3, decode_s=0.4, total_s=1.0)


async def open_store(url: str) -> JobStore:
    return JobStore(engine=await open_database(url))


@pytest.fixture
async def store(database_url) -> AsyncIterator[JobStore]:
    store = await open_store(database_url)
    yield store
    await store.engine.dispose()


async def test_a_job_comes_back_as_it_was(store, database_url):
    made = await store.create(REQUEST, "0.625")
    other = await open_store(database_url)
    assert await other.get(made.id) == made
    await other.engine.dispose()
    assert (made.request, made.seconds, made.status, made.attempts) == (REQUEST, "0.625", "queued", 0)
    assert await store.get("video_none") is None


async def test_the_oldest_job_comes_first_and_only_once(store):
    jobs = [await store.create(REQUEST, "1") for _ in range(3)]
    claims = Claims(store=store, lease_s=10)
    assert await claims.take(["other"]) is None
    assert await claims.take([]) is None
    taken = [await claims.take(["clips"]) for _ in range(3)]
    assert [claim.job.id for claim in taken] == [job.id for job in jobs]
    assert all((claim.job.status, claim.job.attempts) == ("in_progress", 1) for claim in taken)
    assert await claims.take(["clips"]) is None


async def test_many_takers_never_share_a_job(store, database_url):
    jobs = {(await store.create(REQUEST, "1")).id for _ in range(12)}
    stores = [await open_store(database_url) for _ in range(4)]

    async def take_all(store: JobStore) -> list[str]:
        claims, taken = Claims(store=store, lease_s=10), []
        while claim := await claims.take(["clips"]):
            taken.append(claim.job.id)
        return taken

    taken = [job_id for one in await asyncio.gather(*map(take_all, stores)) for job_id in one]
    assert sorted(taken) == sorted(jobs)
    for other in stores:
        await other.engine.dispose()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """What the claims think the time is, in ``now_s``."""
    clock = SimpleNamespace(now_s=time.time())
    monkeypatch.setattr("deployments.clips.claims.time", SimpleNamespace(time=lambda: clock.now_s))
    return clock


async def test_a_claim_that_ran_out_is_taken_over(store, clock):
    await store.create(REQUEST, "1")
    claims = Claims(store=store, lease_s=10)
    first = await claims.take(["clips"])
    clock.now_s += 6
    assert await claims.report(first, 40, 1)
    clock.now_s += 6
    assert await claims.take(["clips"]) is None  # the report renewed it
    clock.now_s += 6
    second = await claims.take(["clips"])
    assert (second.job.id, second.job.attempts, second.job.progress) == (first.job.id, 2, 0)
    assert not await claims.report(first, 50, 1)
    assert not await claims.complete(first, TIMINGS)
    assert not await claims.fail(first, JobError(code="c", message="m"))
    assert not await claims.give_back(first, wait_s=0, counts=True)
    assert await claims.complete(second, TIMINGS)
    job = await store.get(first.job.id)
    assert (job.status, job.progress, job.timings) == ("completed", 100, TIMINGS)
    assert job.completed_at >= job.created_at
    assert await claims.take(["clips"]) is None


async def test_giving_back(store, clock):
    claims = Claims(store=store, lease_s=10)
    await store.create(REQUEST, "1")
    claim = await claims.take(["clips"])
    assert await claims.give_back(claim, wait_s=5, counts=False)
    assert await store.num_waiting() == 1
    assert await claims.take(["clips"]) is None
    clock.now_s += 5.1
    claim = await claims.take(["clips"])
    assert claim.job.attempts == 1
    await claims.give_back(claim, wait_s=0, counts=True)
    claim = await claims.take(["clips"])
    assert claim.job.attempts == 2
    assert await claims.fail(claim, JobError(code="c", message="m"))
    job = await store.get(claim.job.id)
    assert (job.status, job.error) == ("failed", JobError(code="c", message="m"))


async def test_deletion_takes_the_claim(store):
    claims = Claims(store=store, lease_s=10)
    await store.create(REQUEST, "1")
    claim = await claims.take(["clips"])
    assert await store.delete(claim.job.id)
    assert not await store.delete(claim.job.id)
    assert not await claims.report(claim, 10, 0)


async def test_pages_and_age(store):
    jobs = [await store.create(REQUEST, "1") for _ in range(4)]
    newest_first = await store.page(after=None, limit=3, ascending=False)
    assert [job.id for job in newest_first] == [job.id for job in jobs[:0:-1]]
    assert [job.id for job in await store.page(after=jobs[1], limit=9, ascending=True)] == [job.id for job in jobs[2:]]
    claims = Claims(store=store, lease_s=10)
    await claims.complete(await claims.take(["clips"]), TIMINGS)
    assert await store.finished_before(time.time() + 1) == [jobs[0].id]
    assert await store.finished_before(time.time() - 1) == []


async def test_tables_made_by_two_at_once(database_url):
    stores = await asyncio.gather(*(open_store(database_url) for _ in range(4)))
    await stores[0].create(REQUEST, "1")
    assert await stores[3].num_waiting() == 1
    for store in stores:
        await store.engine.dispose()
