"""Nobody is overtaken for ever, whatever comes in whatever order."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import StepPlan
from engines.gang.policies.shortest import Shortest
from tests.engines.gang.support.plans import job, scheduler
from tests.support.unhurried import UNHURRIED

MAX_OVERTAKEN = 3.0
STEP_S = {"short": 1.0, "usual": 3.5, "long": 20.0}
"""On one rank. A team of w takes w ** -0.8 of it."""


@dataclass(frozen=True, kw_only=True)
class Come:
    """A job that comes after so many plans."""

    shape: str
    num_steps: int
    num_plans_before: int


COMES = st.builds(
    Come, shape=st.sampled_from(sorted(STEP_S)), num_steps=st.integers(1, 6), num_plans_before=st.integers(0, 8)
)


def step_s(shape: str, num_ranks: int) -> float:
    return STEP_S[shape] / float(num_ranks**0.8)


def worst_overtaking(
    comes: list[Come], policy: Shortest, *, num_ranks: int, elastic: bool, max_running: int
) -> dict[str, float]:
    """By job, the gang-seconds that later ones had in plans in which it had nothing, by the plans alone."""
    subject = scheduler(num_ranks=num_ranks, max_running_jobs=max_running, elastic=elastic, policy=policy)
    overtaken_s: defaultdict[str, float] = defaultdict(float)
    number = {str(i): i for i in range(len(comes))}
    shape = {str(i): come.shape for i, come in enumerate(comes)}
    open_jobs: set[str] = set()

    def look_at(plan: StepPlan) -> None:
        at_work = {job_id for work in plan.works for job_id in work.job_ids}
        for work in plan.works:
            (step,) = work.job_steps
            gang_s = step_s(shape[step.job_id], work.num_ranks) * work.num_ranks / num_ranks
            for waiting in open_jobs - at_work:
                if number[waiting] < number[step.job_id]:
                    overtaken_s[waiting] += gang_s
            open_jobs.difference_update({step.job_id} if step.emit == "final" else ())

    for i, come in enumerate(comes):
        for _ in range(come.num_plans_before):
            if plan := subject.next_plan():
                look_at(plan)
        subject.add(job_of(str(i), come))
        open_jobs.add(str(i))
    while plan := subject.next_plan():
        look_at(plan)
    assert not open_jobs
    return overtaken_s


def job_of(job_id: str, come: Come) -> Job:
    sizes = (1, 2, 4)
    return Job(
        job_id=job_id,
        request=None,
        conditioning=None,
        num_steps=come.num_steps,
        estimates_s={size: step_s(come.shape, size) for size in sizes},
    )


@settings(**UNHURRIED)
@given(
    comes=st.lists(COMES, min_size=1, max_size=24),
    num_ranks=st.sampled_from([1, 2, 4]),
    elastic=st.booleans(),
    max_running=st.integers(1, 4),
)
def test_no_job_is_overtaken_for_longer_than_its_bound(
    comes: list[Come], num_ranks: int, elastic: bool, max_running: int
) -> None:
    """So many times its own time, the step with which that is reached, and those that hold the last places to begin."""
    overtaken_s = worst_overtaking(
        comes, Shortest(MAX_OVERTAKEN), num_ranks=num_ranks, elastic=elastic, max_running=max_running
    )
    longest_s = step_s("long", num_ranks)
    for i, come in enumerate(comes):
        whole_s = come.num_steps * step_s(come.shape, num_ranks)
        assert overtaken_s[str(i)] <= (MAX_OVERTAKEN + max_running) * whole_s + longest_s + 1e-9


LONG_AND_A_STREAM = [
    Come(shape="long", num_steps=2, num_plans_before=0),
    *(Come(shape="short", num_steps=2, num_plans_before=2 * (i > 0)) for i in range(200)),
]


def test_a_stream_of_short_jobs_delays_a_long_one_to_its_bound_and_no_further() -> None:
    """Without ageing it would wait for all of them."""
    for limit, expected_s in ((MAX_OVERTAKEN, MAX_OVERTAKEN * 40), (math.inf, 398)):
        overtaken_s = worst_overtaking(LONG_AND_A_STREAM, Shortest(limit), num_ranks=1, elastic=False, max_running=4)
        assert abs(overtaken_s["0"] - expected_s) <= 2


def test_a_priority_shortens_the_wait_and_a_low_one_lengthens_it() -> None:
    """Whole pictures of equal length, which come together: a quarter of the time counts as a shorter job."""
    subject = scheduler(num_ranks=1)
    for name, priority in (("flex", 0.25), ("default", 1.0), ("priority", 4.0)):
        subject.add(Job(job_id=name, request=None, conditioning=None, num_steps=2, priority=priority))
    order = [work.job_ids[0] for plan in iter(subject.next_plan, None) for work in plan.works]
    assert order == ["priority", "priority", "default", "default", "flex", "flex"]


def test_arrival_goes_by_arrival() -> None:
    from engines.gang.policies.arrival import Arrival

    subject = scheduler(num_ranks=1, policy=Arrival())
    for name, num_steps in (("long", 3), ("short", 1), ("other", 2)):
        subject.add(job(name, num_steps=num_steps))
    order = [work.job_ids[0] for plan in iter(subject.next_plan, None) for work in plan.works]
    assert order == ["long"] * 3 + ["short"] + ["other"] * 2
