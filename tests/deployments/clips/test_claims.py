"""Records and claims work on real databases."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from deployments.clips.database import ClipError
from deployments.clips.store import Claim, Claims, ClipStore
from deployments.database.database import open_database
from deployments.service.interface import StageTimes
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
TIMINGS = StageTimes(queue_s=0.1, encode_s=0.2, denoise_s=0.3, decode_s=0.4, total_s=1.0, was_warm=True)


async def open_store(url: str) -> ClipStore:
    return ClipStore(engine=await open_database(url))


async def taken_by(claims: Claims) -> Claim:
    """Return the next claim, which must exist."""
    claim = await claims.take(["clips"])
    assert claim is not None
    return claim


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[ClipStore]:
    store = await open_store(database_url)
    yield store
    await store.engine.dispose()


async def test_a_clip_comes_back_as_it_was(store: ClipStore, database_url: str) -> None:
    made = await store.create(REQUEST, "0.625")
    other = await open_store(database_url)
    assert await other.get(made.id) == made
    await other.engine.dispose()
    assert (made.request, made.seconds, made.status, made.attempts) == (REQUEST, "0.625", "queued", 0)
    assert await store.get("video_none") is None


async def test_a_new_clip_is_queued_however_soon_a_runner_claims_it(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    claim = "UPDATE troupe_jobs SET status = 'in_progress', attempts = 1"
    async with store.engine.begin() as connection:
        await connection.execute(text(f"CREATE TRIGGER runner AFTER INSERT ON troupe_jobs BEGIN {claim}; END"))
    made = await store.create(REQUEST, "1")
    assert (made.status, made.attempts) == ("queued", 0)
    assert await store.get(made.id) == replace(made, status="in_progress", attempts=1)
    await store.engine.dispose()


async def test_the_oldest_clip_comes_first_and_only_once(store: ClipStore) -> None:
    clips = [await store.create(REQUEST, "1") for _ in range(3)]
    claims = Claims(store=store, lease_s=10)
    assert await claims.take(["other"]) is None
    assert await claims.take([]) is None
    taken = [await taken_by(claims) for _ in range(3)]
    assert [claim.clip.id for claim in taken] == [clip.id for clip in clips]
    assert all((claim.clip.status, claim.clip.attempts) == ("in_progress", 1) for claim in taken)
    assert await claims.take(["clips"]) is None


async def test_many_takers_never_share_a_clip(store: ClipStore, database_url: str) -> None:
    clips = {(await store.create(REQUEST, "1")).id for _ in range(12)}
    stores = [await open_store(database_url) for _ in range(4)]

    async def take_all(store: ClipStore) -> list[str]:
        claims, taken = Claims(store=store, lease_s=10), []
        while claim := await claims.take(["clips"]):
            taken.append(claim.clip.id)
        return taken

    taken = [clip_id for one in await asyncio.gather(*map(take_all, stores)) for clip_id in one]
    assert sorted(taken) == sorted(clips)
    for other in stores:
        await other.engine.dispose()


async def test_a_claim_that_ran_out_is_taken_over(store: ClipStore, clock: SimpleNamespace) -> None:
    await store.create(REQUEST, "1")
    claims = Claims(store=store, lease_s=10)
    first = await taken_by(claims)
    clock.now_s += 6
    assert await claims.report(first, 40, 1)
    clock.now_s += 6
    assert await claims.take(["clips"]) is None  # the report renewed it
    clock.now_s += 6
    second = await taken_by(claims)
    assert (second.clip.id, second.clip.attempts, second.clip.progress) == (first.clip.id, 2, 0)
    assert not await claims.report(first, 50, 1)
    assert not await claims.complete(first, TIMINGS)
    assert not await claims.fail(first, ClipError(code="c", message="m"))
    assert not await claims.give_back(first, wait_s=0, counts=True)
    assert await claims.complete(second, TIMINGS)
    clip = await store.get(first.clip.id)
    assert clip is not None
    assert (clip.status, clip.progress, clip.timings) == ("completed", 100, TIMINGS)
    assert clip.completed_at is not None
    assert clip.completed_at >= clip.created_at
    assert await claims.take(["clips"]) is None


async def test_giving_back(store: ClipStore, clock: SimpleNamespace) -> None:
    claims = Claims(store=store, lease_s=10)
    await store.create(REQUEST, "1")
    claim = await taken_by(claims)
    assert await claims.give_back(claim, wait_s=5, counts=False)
    assert await store.num_waiting() == 1
    assert await claims.take(["clips"]) is None
    clock.now_s += 5.1
    claim = await taken_by(claims)
    assert claim.clip.attempts == 1
    await claims.give_back(claim, wait_s=0, counts=True)
    claim = await taken_by(claims)
    assert claim.clip.attempts == 2
    assert await claims.fail(claim, ClipError(code="c", message="m"))
    clip = await store.get(claim.clip.id)
    assert clip is not None
    assert (clip.status, clip.error) == ("failed", ClipError(code="c", message="m"))


async def test_deletion_takes_the_claim(store: ClipStore) -> None:
    claims = Claims(store=store, lease_s=10)
    await store.create(REQUEST, "1")
    claim = await taken_by(claims)
    assert await store.delete(claim.clip.id)
    assert not await store.delete(claim.clip.id)
    assert not await claims.report(claim, 10, 0)


async def test_pages_and_age(store: ClipStore) -> None:
    clips = [await store.create(REQUEST, "1") for _ in range(4)]
    newest_first = await store.page(after=None, limit=3, ascending=False)
    assert [clip.id for clip in newest_first] == [clip.id for clip in clips[:0:-1]]
    assert [clip.id for clip in await store.page(after=clips[1], limit=9, ascending=True)] == [
        clip.id for clip in clips[2:]
    ]
    claims, before_s = Claims(store=store, lease_s=10), time.time()
    await claims.complete(await taken_by(claims), TIMINGS)
    assert await store.finished_before(time.time() + 1) == [clips[0].id]
    assert await store.finished_before(before_s) == []


async def test_a_new_database_waits_for_another_that_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(open_store(f"sqlite:///{path}"))
        await asyncio.sleep(0.2)
        assert not opening.done()
        other.execute("COMMIT")
        store = await opening
    assert await store.num_waiting() == 0
    await store.engine.dispose()


async def test_tables_made_by_two_at_once(database_url: str) -> None:
    stores = await asyncio.gather(*(open_store(database_url) for _ in range(4)))
    await stores[0].create(REQUEST, "1")
    assert await stores[3].num_waiting() == 1
    for store in stores:
        await store.engine.dispose()
