"""A gang of two real ranks over Gloo: jobs, failures of jobs, and cancellation."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import ray
import torch

from engines.core.engine import JobFailedError
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.gang import Gang
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.job import JobDone, PreviewReady, Progress
from engines.gang.jobs.job_table import JobTable
from engines.gang.metrics import GangMetrics
from tests.engines.gang.support.checks import assert_equal, assert_unharmed, metric
from tests.engines.gang.support.fakes import (
    CONDITIONING_L,
    FakeRequest,
    awaited,
    fake_job,
    reference_latents,
    wait_for_file,
)
from tests.engines.gang.support.helpers import eventually, gang_of, latents, run, submit
from tests.engines.gang.support.plans import num_steps_left

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, max_running_jobs=4, max_waiting_jobs=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gang(ray_cluster: None) -> AsyncIterator[Gang]:
    async with gang_of(CONFIG) as gang:
        yield gang
        assert gang.broken is None


async def test_a_job_gives_its_steps_previews_and_latents(gang: Gang) -> None:
    request = FakeRequest(seed=1, num_steps=5)
    *events, done = await run(gang, fake_job("one", request, preview_steps=frozenset({2, 5})))
    assert [e.step for e in events if isinstance(e, Progress)] == [1, 2, 3, 4, 5]
    assert {(e.num_steps, e.num_ranks) for e in events if isinstance(e, Progress)} == {(5, 2)}
    (preview,) = [e for e in events if isinstance(e, PreviewReady)]
    assert preview.step == 2
    assert_equal(preview.latents.open(), reference_latents(FakeRequest(seed=1, num_steps=2)))
    assert isinstance(done, JobDone)
    assert_equal(done.latents.open(), reference_latents(request))


async def test_jobs_take_turns_and_each_gets_its_own_progress(gang: Gang, tmp_path: Path) -> None:
    """No step is done before the scheduler holds all three jobs."""
    order: list[str] = []
    gate = tmp_path / "gate"

    async def follow(name: str, num_steps: int) -> torch.Tensor:
        request = FakeRequest(seed=len(name), num_steps=num_steps, gate=str(gate))
        async for event in submit(gang, fake_job(name, request)):
            order.append(name)
            last = event
        assert isinstance(last, JobDone)
        opened: torch.Tensor = last.latents.open()
        return opened

    jobs = [asyncio.ensure_future(follow(name, num)) for name, num in (("long", 30), ("short", 5), ("other", 5))]
    await eventually(lambda: num_steps_left(gang._driver.scheduler).keys() == {"long", "short", "other"})
    gate.touch()
    results = await asyncio.gather(*jobs)
    assert_equal(results[0], reference_latents(FakeRequest(seed=4, num_steps=30)))
    assert Counter(order) == {"long": 31, "short": 6, "other": 6}
    assert order[:17].count("long") <= 7, "the long job does not hold up the short ones"


async def test_conditioning_by_reference_is_awaited_on_the_ranks(gang: Gang, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    @ray.remote(num_cpus=0.1)
    def encode() -> torch.Tensor:
        wait_for_file(str(gate))
        return CONDITIONING_L

    request, other = FakeRequest(seed=3, num_steps=2), FakeRequest(seed=5, num_steps=3)
    pending = asyncio.ensure_future(latents(gang, fake_job("pending", request, conditioning=encode.remote())))
    assert_equal(await latents(gang, fake_job("meanwhile", other)), reference_latents(other))
    gate.touch()
    assert_equal(await pending, reference_latents(request))


async def test_a_failed_conditioning_fails_the_job_with_its_error(gang: Gang) -> None:
    @ray.remote(num_cpus=0.1)
    def encode() -> torch.Tensor:
        raise ValueError("no such language")

    with pytest.raises(ValueError, match="no such language"):
        await run(gang, fake_job("unencoded", FakeRequest(seed=1, num_steps=2), conditioning=encode.remote()))
    await assert_unharmed(gang, "after unencoded")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"bad_begin": True}, "this request has no beginning"),
        ({"fault": "value_error", "fault_step": 3}, "the engine cannot take this shape"),
        ({"fault": "job_failed", "fault_step": 3}, "the forward cannot be computed"),
        ({"bad_preview": True}, "this request has no preview"),
    ],
)
async def test_a_job_that_fails_in_its_maths_fails_alone(gang: Gang, fault: dict[str, object], message: str) -> None:
    bad = fake_job(f"bad {message}", FakeRequest(seed=1, num_steps=6, **fault), preview_steps=frozenset({2}))  # type: ignore[arg-type]
    good = FakeRequest(seed=2, num_steps=6)
    beside = asyncio.ensure_future(latents(gang, fake_job(f"beside {message}", good)))
    with pytest.raises((ValueError, JobFailedError), match=message):
        await run(gang, bad)
    assert_equal(await beside, reference_latents(good))
    await assert_unharmed(gang, f"after {message}")


async def test_a_schedule_of_another_length_than_promised_is_an_error(gang: Gang) -> None:
    with pytest.raises(RuntimeError, match="the job says 3 steps and its schedule has 2"):
        await run(gang, fake_job("long", FakeRequest(seed=1, num_steps=2), num_steps=3))


async def test_bad_jobs_never_reach_a_rank(gang: Gang) -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        await run(gang, fake_job("none", FakeRequest(seed=1, num_steps=0)))
    stream = submit(gang, fake_job("twice", FakeRequest(seed=1, num_steps=50)))
    await anext(stream)
    with pytest.raises(ValueError, match="job id 'twice' is in use"):
        await run(gang, fake_job("twice", FakeRequest(seed=1, num_steps=2)))
    await stream.aclose()


async def test_a_full_queue_turns_jobs_away(gang: Gang) -> None:
    jobs = [asyncio.ensure_future(run(gang, fake_job(f"full{i}", FakeRequest(seed=i, num_steps=3)))) for i in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as caught:
        await run(gang, fake_job("too many", FakeRequest(seed=0, num_steps=1)))
    assert caught.value.num_waiting == 60
    assert caught.value.retry_after_s >= 1
    was_accepted = replace(fake_job("accepted", FakeRequest(seed=0, num_steps=1)), accepted=True)
    assert isinstance((await run(gang, was_accepted))[-1], JobDone)
    await asyncio.gather(*jobs)


@pytest.mark.parametrize("way", ["aclose", "cancel"])
async def test_a_cancelled_job_stops_on_all_ranks_within_two_steps(
    gang: Gang, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """The count starts at the step that the gang knew of when it cancelled the job."""
    caplog.set_level(logging.INFO, logger="engines.gang.driver")
    trace = tmp_path / "trace"
    request = FakeRequest(seed=1, num_steps=1000, step_s=0.03, trace=str(trace))
    reached = asyncio.Event()

    async def follow() -> None:
        stream = submit(gang, fake_job(f"cancelled by {way}", request))
        async for event in stream:
            if isinstance(event, Progress) and event.step == 5:
                reached.set()
                if way == "aclose":
                    await stream.aclose()
                    return

    task = asyncio.ensure_future(follow())
    await reached.wait()
    task.cancel()
    await asyncio.wait([task])
    await assert_unharmed(gang, f"after {way}")
    num_steps = Counter(trace.read_text().split())
    assert set(num_steps) == {str(info.pid) for info in gang.infos}
    assert len(set(num_steps.values())) == 1, "all ranks stopped at the same step"
    (known,) = [record.num_steps_done for record in caplog.records if record.message == "job is cancelled"]  # type: ignore[attr-defined]
    assert 5 <= known <= max(num_steps.values()) <= known + CONFIG.plans_ahead


async def test_half_of_sixty_jobs_dropped_at_random_moments(gang: Gang) -> None:
    rng = random.Random(0)
    requests = [FakeRequest(seed=i, num_steps=rng.randint(3, 12)) for i in range(60)]

    async def keep(i: int) -> None:
        await asyncio.sleep(rng.random())
        assert_equal(await latents(gang, fake_job(f"kept{i}", requests[i])), reference_latents(requests[i]))

    async def abandon(i: int) -> None:
        await asyncio.sleep(rng.random())
        task = asyncio.ensure_future(run(gang, fake_job(f"dropped{i}", requests[i])))
        await asyncio.sleep(rng.random())
        task.cancel()
        await asyncio.wait([task])

    await asyncio.gather(*(keep(i) if i % 2 else abandon(i) for i in range(60)))
    await assert_unharmed(gang, "after the storm")


async def test_health_is_checked_while_a_step_runs(gang: Gang, tmp_path: Path) -> None:
    """The step ends after the check."""
    gate = tmp_path / "gate"
    following = asyncio.ensure_future(run(gang, fake_job("slow", FakeRequest(seed=1, num_steps=2, gate=str(gate)))))
    await eventually(awaited(gate).exists)
    await gang.check_health()
    assert not following.done()
    gate.touch()
    await following


async def test_a_job_goes_on_where_its_gang_fell_asleep(gang: Gang, tmp_path: Path) -> None:
    """One job has begun, one arrives while the gang is asleep, and a third is cancelled meanwhile."""
    gate, request, late = tmp_path / "gate", FakeRequest(seed=1, num_steps=6), FakeRequest(seed=2, num_steps=3)
    trace, labels = tmp_path / "trace", {"model": "fake", "direction": "wake"}
    num_wakes = metric("troupe_swap_seconds_count", **labels)
    first = replace(fake_job("begun", replace(request, gate=str(gate))), additions="one")
    begun = asyncio.ensure_future(latents(gang, first))
    await eventually(awaited(gate).exists)
    assert set(gang._driver.scheduler._gang.additions) == {"one"}
    falling_asleep = asyncio.ensure_future(gang.sleep())
    await asyncio.sleep(0)
    gate.touch()
    uses = await falling_asleep
    assert not set(gang._driver.scheduler._gang.additions), "weights sleep as they were loaded"
    assert [(use.device, use.weights) for use in uses] == [("cpu", 4)] * 2
    assert metric("troupe_gangs_awake", model="fake") == 0
    dropped = asyncio.ensure_future(run(gang, fake_job("dropped", replace(late, trace=str(trace)))))
    later = asyncio.ensure_future(latents(gang, fake_job("late", replace(late, trace=str(trace)))))
    await eventually(lambda: num_steps_left(gang._driver.scheduler).keys() == {"begun", "late", "dropped"})
    assert gang.demand().backlog_s > 0
    await gang.check_health()
    dropped.cancel()
    async with asyncio.timeout(60):
        assert await gang.spent_s("dropped") == 0, "the ranks have forgotten it in their sleep"
    assert not trace.exists(), "no step was done"
    assert not begun.done()
    await gang.sleep()  # it is asleep already
    await gang.wake()
    assert_equal(await begun, reference_latents(request))
    assert_equal(await later, reference_latents(late))
    assert metric("troupe_swap_seconds_count", **labels) == num_wakes + 1
    assert (gang.demand().backlog_s, metric("troupe_gangs_awake", model="fake")) == (0, 1)


async def test_who_wants_it_awake_again_need_not_wait_for_its_sleep(gang: Gang) -> None:
    falling_asleep = asyncio.ensure_future(gang.sleep())
    await asyncio.sleep(0)
    await gang.wake()
    await falling_asleep
    await assert_unharmed(gang, "after a nap")


async def test_steps_jobs_and_starts_are_counted_in_seconds(gang: Gang) -> None:
    model = {"model": "fake"}
    ends = ("done", "failed")

    def counted() -> dict[str, float]:
        jobs = {end: metric("troupe_jobs_total", **model, outcome=end) for end in ends}
        return jobs | {"cold": metric("troupe_cold_jobs_total", **model)}

    def steps(what: str) -> float:
        return metric(f"troupe_step_seconds_{what}", **model, num_ranks="2")

    before, sum_s, count = counted(), steps("sum"), steps("count")
    events = await run(gang, fake_job("measured", FakeRequest(seed=1, num_steps=2)))
    (last,) = [event for event in events if isinstance(event, JobDone)]
    assert steps("count") - count == 2
    assert 2 * (steps("sum") - sum_s) == pytest.approx(last.gpu_s, rel=1e-9)
    with pytest.raises(ValueError, match="no beginning"):
        await run(gang, fake_job("measured badly", FakeRequest(seed=1, num_steps=2, bad_begin=True)))
    expected = {"done": 1, "failed": 1, "cold": 0 if last.was_warm else 1}
    assert {name: value - before[name] for name, value in counted().items()} == expected
    assert metric("troupe_gang_start_seconds_count", **model) >= 1
    assert metric("troupe_gangs", **model) >= 1
    assert metric("troupe_jobs_running", **model) == metric("troupe_jobs_waiting", **model) == 0


async def test_what_waits_is_told_apart_from_what_runs() -> None:
    config = GangConfig(num_ranks=1, max_running_jobs=2, max_waiting_jobs=3)
    table = JobTable(config, GangMetrics("counted"), Clock())
    opened = [table.open(fake_job(f"job {i}", FakeRequest(seed=i, num_steps=1)), 1.0) for i in range(4)]

    def open_jobs() -> tuple[float, float]:
        return metric("troupe_jobs_running", model="counted"), metric("troupe_jobs_waiting", model="counted")

    assert open_jobs() == (2, 2)
    for each in opened[:3]:
        table.end(each, "done")
    assert open_jobs() == (1, 0)


async def test_all_ranks_load_an_addition_or_say_why_not(gang: Gang) -> None:
    assert await gang.load_addition("ink") == len("ink") + 1, "the largest"
    with pytest.raises(ValueError, match=r"^bad ink is no addition$"):
        await gang.load_addition("bad ink")
    request = FakeRequest(seed=1, num_steps=2)
    with pytest.raises(ValueError, match=r"^bad ink is no addition$"):
        await run(gang, fake_job("with a bad one", replace(request, addition="bad ink")))
    *_, done = await run(gang, fake_job("with a good one", replace(request, addition="oil")))
    assert isinstance(done, JobDone)
    assert_equal(done.latents.open(), reference_latents(request))
    await gang.remove_addition("ink")
    with pytest.raises(GangBrokenError, match=r"rank [01] failed: KeyError: 'ink'"):
        await gang.remove_addition("ink")  # this strict fake shows that the first call reached all ranks
    assert gang.broken is None, "a call beside the steps breaks no gang"
