"""A gang breaks during a request: the request succeeds with the same bytes, and its client sees only a delay."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from tests.deployments.support.live import (
    IMAGES,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    finished,
    footprint,
    log_lines,
    picture,
    rank_pids,
    replica_pid,
    stream_of,
    wait_until,
)
from tests.end_to_end.conftest import PICTURES
from tests.engines.gang.support.helpers import alive, num_placement_groups

NUM_STEPS = 60
"""Enough steps that the job still runs when its gang is struck."""
SEED = 1


@pytest.fixture(autouse=True)
def leaves_nothing(url: str) -> Iterator[None]:
    """Check that each test ends with the processes, sockets and placement groups of its begin."""

    def found() -> object:
        return footprint(), num_placement_groups()

    wait_until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200, "healthy")
    before = found()
    yield
    wait_until(lambda: found() == before, f"nothing leaks: {before} before")


@asynccontextmanager
async def health_of(client: httpx.AsyncClient) -> AsyncIterator[list[int]]:
    """Yield the statuses of ``GET /health`` during the block."""
    statuses: list[int] = []

    async def look() -> None:
        while True:
            statuses.append((await client.get("/health", timeout=TIMEOUT_S)).status_code)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(look())
    try:
        yield statuses
    finally:
        task.cancel()


@pytest.fixture(scope="module")
def reference(url: str) -> bytes:
    """Return the picture of ``SEED`` from intact gangs."""
    return picture(url, seed=SEED, num_inference_steps=NUM_STEPS)


async def drawn_in_spite_of(url: str, break_it: Callable[[], None]) -> tuple[bytes, float, list[int]]:
    """Stream a picture whose gang breaks at step three. Return its bytes, the longest silence, and health statuses."""
    longest_s, last_s, steps = 0.0, time.monotonic(), []
    async with httpx.AsyncClient(base_url=url) as client, health_of(client) as statuses:
        async with stream_of(client, {"seed": SEED, "num_inference_steps": NUM_STEPS}) as events:
            async for event in events:
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
                steps += [event["step"]] if event["type"] == "troupe.progress" else []
                if steps == [1, 2, 3]:
                    break_it()
        assert steps.count(1) == 2, "it was run again from the start"
        assert steps[-NUM_STEPS:] == list(range(1, NUM_STEPS + 1))
        while 503 not in statuses or statuses[-1] != 200:
            await asyncio.sleep(0.05)
    return finished(event), longest_s, statuses


def gangs() -> list[list[int]]:
    """Return the processes of each gang for pictures that was ready once."""
    return [line["pids"] for line in log_lines("gang is ready") if line["model"] == PICTURES]


BREAKS: dict[str, tuple[signal.Signals, Callable[[], int]]] = {
    "kill rank 0": (signal.SIGKILL, lambda: rank_pids(PICTURES)[0]),
    "kill rank 1": (signal.SIGKILL, lambda: rank_pids(PICTURES)[1]),
    "kill the replica": (signal.SIGKILL, lambda: replica_pid(f"Denoiser-{PICTURES}")),
    "stop rank 1": (signal.SIGSTOP, lambda: rank_pids(PICTURES)[1]),
}
"""The signal, and the process that gets it."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("kill rank 0", marks=pytest.mark.slow),  # the next test kills a rank, too
        pytest.param("kill rank 1", marks=pytest.mark.slow),
        "kill the replica",
        "stop rank 1",
    ],
)
async def test_a_request_survives_its_gang(
    url: str,
    reference: bytes,
    name: str,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pids = [*rank_pids(PICTURES), replica_pid(f"Denoiser-{PICTURES}")]
    (zygote,) = {psutil.Process(pid).ppid() for pid in rank_pids(PICTURES)}
    strike, find_victim = BREAKS[name]
    victim = find_victim()  # now: the job goes on while logs are read
    data, delay_s, statuses = await drawn_in_spite_of(url, lambda: os.kill(victim, strike))
    assert data == reference
    assert set(statuses) == {200, 503}
    wait_until(lambda: not alive(pids), "the old gang is gone")
    assert {psutil.Process(pid).ppid() for pid in rank_pids(PICTURES)} == {zygote}, "new ranks are forked, too"
    record_property("delay_s", round(delay_s, 2))
    with capsys.disabled():
        print(f"{name}: the client waited {delay_s:.2f} s")


def test_a_request_that_keeps_killing_its_gang_is_given_up_and_its_neighbour_is_not(url: str, reference: bytes) -> None:
    request_id, killed, num_gangs = "poison", set(), len(gangs())

    def kill_again() -> bool:
        """Kill a rank as soon as it runs the request; return whether the answers are there."""
        for line in log_lines("job begins"):
            if line["request_id"].startswith(request_id) and line["rank"] == 1 and line["gang_job_id"] not in killed:
                killed.add(line["gang_job_id"])
                os.kill(rank_pids(PICTURES)[1], signal.SIGKILL)
        return poison.done() and neighbour.done()

    body, headers = {"prompt": PROMPT, **SMALL, "num_inference_steps": NUM_STEPS}, {"x-request-id": request_id}
    with ThreadPoolExecutor() as threads:
        neighbour = threads.submit(picture, url, seed=SEED, num_inference_steps=NUM_STEPS)
        poison = threads.submit(httpx.post, f"{url}{IMAGES}", json=body, headers=headers, timeout=TIMEOUT_S)
        wait_until(kill_again, "both answers", at_once=True)
    assert neighbour.result() == reference
    answer = poison.result()
    assert len(killed) == 2, "two attempts"
    assert answer.status_code == 502
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "gang_broken")
    reason = "given up after 2 broken gangs; the last: rank 1 died: The actor "
    assert error["message"].startswith(f"The ranks that worked on this request failed: {reason}")
    assert "\n" not in error["message"]
    wait_until(lambda: len(gangs()) == num_gangs + 2, "a gang after the second")  # health may say 200 until Serve knows
    wait_until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200, "healthy")
    assert picture(url, seed=SEED, num_inference_steps=NUM_STEPS) == reference, "the next request works"
