"""The jobs of clients that disconnect stop on all ranks, and no other client notices."""

from __future__ import annotations

import asyncio
import json
import random
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
from ray import serve
from ray.serve.exceptions import RequestCancelledError

from deployments.service.interface import Queued
from tests.deployments.support.live import (
    IMAGES,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    log_lines,
    picture,
    rank_pids,
    stream_of,
    streamed,
    wait_until,
)
from tests.end_to_end.conftest import LONG_CLIP, LONGEST, NUM_WAITING, PICTURES, SMALL_CLIP

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

NUM_SEEDS = 5
LONG = SMALL | {"size": "256x256", "num_inference_steps": LONGEST}
"""The largest picture with the most steps: none of these jobs ends by itself during a test."""


def cancelled() -> dict[str, int]:
    """Return the jobs that their gangs cancelled, with their finished steps."""
    return {line["gang_job_id"]: line["num_steps_done"] for line in log_lines("job is cancelled")}


def dropped() -> dict[str, dict[int, int]]:
    """Return the jobs that ranks dropped, with the finished steps of each rank."""
    jobs: dict[str, dict[int, int]] = {}
    for line in log_lines("job is dropped"):
        jobs.setdefault(line["gang_job_id"], {})[line["rank"]] = line["num_steps_done"]
    return jobs


def held_jobs() -> set[tuple[str, int]]:
    """Return jobs with the ranks that began them and have neither ended nor dropped them, including killed ranks."""

    def places(message: str) -> set[tuple[str, int]]:
        return {(line["gang_job_id"], line["rank"]) for line in log_lines(message)}

    return places("job begins") - places("job ends") - places("job is dropped")


def assert_dropped_within_two_steps(job_id: str) -> None:
    """Check that all ranks are at the same step, at most two beyond the gang's when it cancelled the job."""
    wait_until(lambda: len(dropped().get(job_id, {})) == 2, "both ranks drop the job")
    num_steps_done, by_rank = cancelled()[job_id], dropped()[job_id]
    assert set(by_rank) == {0, 1}
    assert len(set(by_rank.values())) == 1
    assert num_steps_done <= by_rank[0] <= num_steps_done + 2


def newly_cancelled(before: dict[str, int]) -> str:
    wait_until(lambda: len(cancelled()) == len(before) + 1, "the gang cancels the job")
    (job_id,) = cancelled().keys() - before.keys()
    return job_id


@pytest.mark.parametrize("num_streams", [20, pytest.param(NUM_WAITING, marks=pytest.mark.slow)])
async def test_streams_half_of_them_dropped_at_random_moments(url: str, num_streams: int) -> None:
    rng = random.Random(20)
    references = {seed: picture(url, seed=seed) for seed in range(NUM_SEEDS)}
    pids, before, dropped_before = rank_pids(PICTURES), held_jobs(), dropped()
    starts_s = [rng.uniform(0, 1.5) for _ in range(num_streams)]
    stays_s: dict[int, float | None] = {i: rng.uniform(0, 1.5) for i in range(num_streams)}
    leaves_at_step = {i: rng.randint(1, 5) for i in range(0, num_streams, 4)}  # however long it takes to get there
    stays_s |= dict.fromkeys(leaves_at_step)
    limits = httpx.Limits(max_connections=None)

    async def keep(client: httpx.AsyncClient, i: int) -> None:
        await asyncio.sleep(starts_s[i])
        assert await streamed(client, seed=i % NUM_SEEDS) == references[i % NUM_SEEDS]

    async def drop(client: httpx.AsyncClient, i: int) -> None:
        await asyncio.sleep(starts_s[i])
        try:
            async with asyncio.timeout(stays_s[i]), stream_of(client, LONG | {"size": "128x128"}) as events:
                async for event in events:
                    assert event["type"] == "troupe.progress", "it is too long to end"
                    if event["step"] == leaves_at_step.get(i):
                        return
        except TimeoutError:
            return
        raise AssertionError("the stream ended by itself")

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        await asyncio.gather(*(keep(client, i) if i % 2 else drop(client, i) for i in range(num_streams)))
    assert rank_pids(PICTURES) == pids, "the same gang all along"
    assert picture(url, seed=0) == references[0]
    wait_until(lambda: held_jobs() <= before, "the ranks have forgotten every job")
    reached_the_ranks = dropped().keys() - dropped_before.keys()
    assert len(reached_the_ranks) >= len(leaves_at_step), "the others may leave before they are admitted"
    for job_id in reached_the_ranks:
        assert_dropped_within_two_steps(job_id)


async def test_a_dropped_stream_stops_on_all_ranks_within_two_steps(url: str) -> None:
    before = cancelled()
    async with (
        httpx.AsyncClient(base_url=url) as client,
        stream_of(client, LONG) as events,
    ):
        async for event in events:
            if event["step"] == 5:
                break
    assert_dropped_within_two_steps(job_id := newly_cancelled(before))
    assert 5 <= dropped()[job_id][0] < LONGEST


def test_a_client_that_hangs_up_before_its_answer_stops_its_jobs(url: str) -> None:
    before, held_before = cancelled(), held_jobs()
    connection = HTTPConnection(url.removeprefix("http://"))
    body, headers = {"prompt": PROMPT, **LONG}, {"Content-Type": "application/json"}
    connection.request("POST", IMAGES, json.dumps(body), headers)
    wait_until(lambda: held_jobs() - held_before, "a rank begins the job")
    connection.close()
    assert_dropped_within_two_steps(newly_cancelled(before))


async def test_cancelling_a_handle_stops_the_job(url: str) -> None:
    handle, before = serve.get_app_handle("troupe").options(stream=True), cancelled()
    response: Any = handle.generate.remote(PROMPT, **LONG)
    assert isinstance(await anext(response), Queued)
    while (await anext(response)).step < 3:
        pass
    response.cancel()
    with pytest.raises(RequestCancelledError):
        [event async for event in response]
    assert_dropped_within_two_steps(job_id := newly_cancelled(before))
    assert 3 <= dropped()[job_id][0] < LONGEST


def test_deleting_a_clip_that_runs_stops_it(url: str) -> None:
    before = cancelled()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as official:
        video = official.videos.create(prompt=PROMPT, extra_body=LONG_CLIP)
        wait_until(lambda: official.videos.retrieve(video.id).progress > 0, "the clip makes progress")
        assert official.videos.retrieve(video.id).status == "in_progress", "too short to be deleted while it runs"
        assert official.videos.delete(video.id).deleted
        assert_dropped_within_two_steps(job_id := newly_cancelled(before))
        assert dropped()[job_id][0] < LONGEST
        again = official.videos.create_and_poll(prompt=PROMPT, poll_interval_ms=100, extra_body=SMALL_CLIP)
        assert again.status == "completed", "the next clip runs unharmed"
