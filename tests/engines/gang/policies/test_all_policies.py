"""For every policy all jobs end, step by step, and the same order of jobs gives the same plans."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import StepPlan
from engines.gang.policies.policy import find_policy, make_policy
from tests.engines.gang.support.plans import num_steps_left, policies_and_gangs, scheduler
from tests.support.unhurried import UNHURRIED

COMES = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.sampled_from([0.5, 1.0, 9.0]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        st.sampled_from(["", "one", "two"]),
    ),
    max_size=10,
)
"""Steps, seconds of one, a key, the number of plans before its arrival, and its additions to the weights."""
Come = tuple[int, float, str, int, str]


def plans_of(policy: str, comes: list[Come], *, elastic: bool) -> list[StepPlan]:
    """Return the plans when ranks become free one after the other, so that teams get steps at different times."""
    subject = scheduler(num_ranks=4, max_running_jobs=3, elastic=elastic, policy=make_policy(policy))
    plans: list[StepPlan] = []

    def go_on(num: int) -> None:
        for turn in range(num):
            free = None if turn % 2 or not elastic else {turn % 4, (turn + 1) % 4}
            if plan := subject.next_plan(free=free, now_s=float(len(plans))):
                plans.append(plan)

    for number, (num_steps, step_s, key, num_before, additions) in enumerate(comes):
        go_on(num_before)
        fields = {"request": None, "conditioning": None, "key": key, "deadline_s": 20.0 if number % 2 else None}
        job = Job(job_id=str(number), num_steps=num_steps, estimates_s={1: step_s}, additions=additions, **fields)  # type: ignore[arg-type]
        subject.add(job, now_s=float(len(plans)))
    while num_steps_left(subject):
        go_on(2)
    return plans


@pytest.mark.parametrize(("policy", "elastic"), policies_and_gangs())
@settings(**UNHURRIED)
@given(comes=COMES)
def test_every_job_ends_and_plans_are_made_again(policy: str, elastic: bool, comes: list[Come]) -> None:
    plans = plans_of(policy, comes, elastic=elastic)
    steps = defaultdict(list)
    for work in (work for plan in plans for work in plan.works):
        for step in work.job_steps:
            steps[int(step.job_id)].append(step.step)
    assert steps == {number: [*range(1, come[0] + 1)] for number, come in enumerate(comes)}
    assert plans == plans_of(policy, comes, elastic=elastic)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'longest'; known: shortest, deadline, fair, arrival"):
        find_policy("longest")
