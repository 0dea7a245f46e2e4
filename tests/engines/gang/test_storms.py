"""In storms of cancellations and deaths under each policy every job has one end, and nothing of it is left."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from tests.engines.gang.support.plans import num_steps_left, policies_and_gangs
from tests.engines.gang.support.storm import NUM_RANKS, Client, Storm, clients, nothing_to_kill
from tests.engines.gang.support.virtual_time import CALL_S, GpuRanks, run_in_virtual_time
from tests.support.unhurried import UNHURRIED

NUM_CLIENTS, OVER_S = 36, 6.0
NUM_STORMS = 4
"""Storms per policy, with teams of one size and of all sizes; each run has new seeds."""


async def weathered(policy: str, *, elastic: bool, seed: int, num_deaths: int) -> tuple[Storm, list[Client]]:
    random = Random(seed)
    coming = clients(random, NUM_CLIENTS, OVER_S)
    deaths_s = [(_death_s(random, coming), random.randrange(NUM_RANKS)) for _ in range(num_deaths)]
    config = GangConfig(
        num_ranks=NUM_RANKS, gpus_per_rank=1.0, elastic=elastic, policy=policy, max_running_jobs=4, max_waiting_jobs=16
    )
    storm = Storm(config=config, shapes={one.job.job_id: one.job.shape for one in coming})
    await storm.weather(coming, deaths_s)
    return storm, coming


def _death_s(random: Random, coming: list[Client]) -> float:
    """Return any time, or one at which ranks learn of a new job."""
    return random.choice([random.uniform(0.2, 2 * OVER_S), random.choice(coming).at_s + CALL_S])


def assert_steps_come_once(ranks: GpuRanks) -> None:
    """Check that each of a job's steps is planned once, in order, and none after its last one."""
    planned: Counter[str] = Counter()
    for _, plan in sorted(ranks.plans.items()):
        for job_step in (step for work in plan.works for step in work.job_steps):
            planned[job_step.job_id] += 1
            assert job_step.step == planned[job_step.job_id]


def assert_nothing_is_left(gang: Gang, ranks: GpuRanks) -> None:
    """Check that no job is left in the table, the scheduler, its policy, or ranks that have begun it."""
    driver = gang._driver
    assert driver._table.jobs == {}
    assert num_steps_left(driver.scheduler) == {}
    steps = [step for plan in ranks.plans.values() for work in plan.works for step in work.job_steps]
    ended = {step.job_id for step in steps if step.emit == "final"}
    dropped = {job_id for plan in ranks.plans.values() for job_id in plan.drops}
    assert {step.job_id for step in steps} <= ended | dropped


@pytest.mark.parametrize(("policy", "elastic"), policies_and_gangs())
@settings(**UNHURRIED, max_examples=NUM_STORMS, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 10**6), num_deaths=st.integers(0, 3))
def test_every_job_has_one_end(policy: str, elastic: bool, seed: int, num_deaths: int) -> None:
    with nothing_to_kill():
        storm, coming = run_in_virtual_time(weathered(policy, elastic=elastic, seed=seed, num_deaths=num_deaths))
    for one in coming:
        (end,) = storm.ends[one.job.job_id]
        stays = one.leaves_after_s is None and one.leaves_at_step is None
        assert end != "left" or not stays
        assert end != "given up" or num_deaths > 1
    assert Counter(end for ends in storm.ends.values() for end in ends)["answered"] > NUM_CLIENTS // 4
    for _, ranks in storm.lives:
        assert_steps_come_once(ranks)
    assert_nothing_is_left(*storm.lives[-1])
