"""Whole loads run through a gang's own driver and policies in virtual time; its ranks report like those on GPUs."""

from __future__ import annotations

import asyncio
from ast import literal_eval
from collections.abc import Sequence
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import pytest

from benchmarks.policies.h200 import STEPS
from benchmarks.policies.simulation import Arrival, SimulatedGang, Simulation
from engines.gang import gang as gang_module
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobQueued
from engines.gang.policies.policy import make_policy
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.plans import policies_and_gangs
from tests.engines.gang.support.virtual_time import LOOK_S, MOVE_S, GpuRanks, run_in_virtual_time, virtual_gang

NUM_RANKS, NUM_STEPS, NUM_ARRIVALS = 2, 28, 60
MEAN_GAP_S = 2.0
SHAPES, SHARES = ("512x512", "1024x1024", "2048x2048"), (70, 25, 5)


def arrivals(seed: int) -> list[Arrival]:
    random, at_s, found = Random(seed), 0.0, []
    for _ in range(NUM_ARRIVALS):
        at_s += random.expovariate(1 / MEAN_GAP_S)
        (shape,) = random.choices(SHAPES, SHARES)
        found.append(Arrival(at_s=at_s, shape=shape, num_steps=NUM_STEPS))
    return found


def known_times() -> StepTimes:
    """Return step times as after a first load."""
    known = StepTimes()
    for shape in SHAPES:
        for size in (1, NUM_RANKS):
            for _ in range(2):
                known.hear_step(
                    fake_job("known", FakeRequest(seed=0, num_steps=2), shape=shape), size, STEPS[shape][size]
                )
    assert known.changed()
    return known


class JobTimes(NamedTuple):
    """Predicted seconds until a job's latents, on its arrival, and the actual ones."""

    eta_s: float | None
    took_s: float


async def went_through(
    load: Sequence[Arrival],
    policy: str,
    known: StepTimes,
    *,
    elastic: bool,
    preview_steps: frozenset[int] = frozenset(),
) -> list[JobTimes]:
    ranks = GpuRanks(NUM_RANKS, STEPS, {str(number): one.shape for number, one in enumerate(load)})
    config = GangConfig(
        num_ranks=NUM_RANKS, gpus_per_rank=1.0, elastic=elastic, policy=policy, max_waiting_jobs=NUM_ARRIVALS
    )

    async def one(gang: Gang, number: int, arrival: Arrival) -> JobTimes:
        await asyncio.sleep(arrival.at_s)
        job = fake_job(
            str(number), FakeRequest(seed=number, num_steps=NUM_STEPS), shape=arrival.shape, preview_steps=preview_steps
        )
        events = [event async for group in gang.submit_grouped(job, every_s=0.0) for event in group]
        assert isinstance(events[0], JobQueued)
        return JobTimes(events[0].eta_s, asyncio.get_running_loop().time() - arrival.at_s)

    async with virtual_gang(config, ranks, model="load", step_times=known) as gang:
        return await asyncio.gather(*(one(gang, number, arrival) for number, arrival in enumerate(load)))


@pytest.mark.parametrize(("policy", "elastic"), policies_and_gangs())
def test_a_load_ends_and_takes_what_is_simulated(policy: str, elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    load = arrivals(seed=1)
    told = run_in_virtual_time(went_through(load, policy, known_times(), elastic=elastic))
    in_gang = fmean(one.took_s for one in told)
    shape = SimulatedGang(steps=STEPS, num_ranks=NUM_RANKS, elastic=elastic)
    simulated = fmean(Simulation(gang=shape, policy=make_policy(policy)).run(load).values())
    assert in_gang == pytest.approx(simulated, rel=0.1)
    errors = [abs(one.eta_s - one.took_s) / one.took_s for one in told if one.eta_s is not None]
    assert len(errors) == len(load)
    assert median(errors) < 0.015, "later jobs may pass some of them"


@pytest.mark.parametrize("preview_steps", [frozenset[int](), frozenset({2, 4})])
@pytest.mark.parametrize("launch_share", [0.01, 0.5, 0.95])
def test_devices_work_all_the_time(
    launch_share: float, preview_steps: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds between jobs, and if a step's calls take as long as its kernels (no captured graph)."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    step_s, num_jobs = STEPS["2048x2048"][1], 3

    async def jobs() -> float:
        ranks = GpuRanks(1, STEPS, dict.fromkeys("abc", "2048x2048"), launch_s=launch_share * step_s)
        config = GangConfig(num_ranks=1, gpus_per_rank=1.0)
        async with virtual_gang(config, ranks, model="load", step_times=known_times()) as gang:

            async def one(name: str) -> None:
                request = FakeRequest(seed=0, num_steps=NUM_STEPS)
                job = fake_job(name, request, shape="2048x2048", preview_steps=preview_steps)
                async for _ in gang.submit_grouped(job, every_s=0.0):
                    pass

            await asyncio.gather(*map(one, "abc"))
            return asyncio.get_running_loop().time()

    took_s = run_in_virtual_time(jobs())
    assert took_s == pytest.approx(num_jobs * NUM_STEPS * step_s, rel=0.05)


@pytest.mark.parametrize("preview_steps", [frozenset[int](), frozenset({7, 14, 21})])
def test_what_steps_take_is_learned(preview_steps: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a team that has a job for its last steps alone."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    learned = StepTimes()
    hear_step = learned.hear_step
    wrong: list[tuple[str, int, float]] = []

    def checked(job: Job, team_size: int, step_s: float) -> None:
        if step_s != pytest.approx(STEPS[str(job.shape)][team_size], rel=0.1):
            wrong.append((str(job.shape), team_size, step_s))
        hear_step(job, team_size, step_s)

    monkeypatch.setattr(learned, "hear_step", checked)
    run_in_virtual_time(went_through(arrivals(seed=2), "shortest", learned, elastic=True, preview_steps=preview_steps))
    assert wrong == []
    for (name, size), step_s in learned.prediction().measured.items():
        assert step_s == pytest.approx(STEPS[literal_eval(name)][size], rel=0.02)
    assert learned.prediction().move_s == pytest.approx(MOVE_S, abs=2 * LOOK_S), "without ranks' waits for each other"
