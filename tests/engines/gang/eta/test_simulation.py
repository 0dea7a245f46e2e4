"""A prediction simulates the policy on a copy, with a few dozen calls at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from engines.gang.eta.prediction import StepPrediction
from engines.gang.jobs.job import Job
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.policies.deadline import Deadline
from engines.gang.policies.fair import Fair
from engines.gang.policies.policy import POLICIES, Candidate, Policy, make_policy
from engines.gang.policies.shortest import Shortest
from tests.engines.gang.support.plans import scheduler


def job(name: str, key: str = "", *, step_s: float = 1.0, num_steps: int = 2, **fields: object) -> Job:
    own = {"request": None, "conditioning": None, "estimates_s": {1: step_s}, **fields}
    return Job(job_id=name, num_steps=num_steps, key=key, **own)  # type: ignore[arg-type]


def real_ends_s(subject: Scheduler, step_s: float = 1.0) -> Iterator[tuple[str, float]]:
    """Yield each job and its end by the plans of one team, whose steps all take ``step_s``."""
    now_s = 0.0
    while plan := subject.next_plan(now_s=now_s):
        now_s += step_s
        yield from ((step.job_id, now_s) for work in plan.works for step in work.job_steps if step.emit)


def crowd(policy: Policy) -> Scheduler:
    """Return a scheduler with jobs of two keys, whose deadlines can all be met."""
    subject = scheduler(num_ranks=1, policy=policy)
    for number in range(20):
        subject.add(job(f"a{number}", "a", num_steps=1 + number % 4, deadline_s=100.0 + number % 7))
    for _ in range(3):
        subject.next_plan()
    for number in range(3):
        subject.add(job(f"b{number}", "b", weight=2.0, deadline_s=99.0))
    return subject


@pytest.mark.parametrize("policy", POLICIES)
def test_ends_are_those_of_the_plans(policy: str) -> None:
    subject = crowd(make_policy(policy))
    predicted_s = dict(subject.ends_s())
    assert predicted_s == pytest.approx(dict(real_ends_s(subject)), abs=2.5)


@pytest.mark.parametrize("switch_s", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_changes_of_weights_are_simulated(policy: str, switch_s: float) -> None:
    """One team follows the plans; a step takes a second, and each change of weights is followed by a step."""
    subject = scheduler(num_ranks=1, policy=make_policy(policy), prediction=StepPrediction(switch_s=switch_s))
    additions = {str(number): "xyz"[number % 3] for number in range(9)}
    for name, kind in additions.items():
        subject.add(job(name, name, additions=kind))
    predicted_s = dict(subject.ends_s())
    ends_s, now_s, last, num_changes = {}, 0.0, "", 0
    while plan := subject.next_plan(now_s=now_s):
        (step,) = plan.works[0].job_steps
        num_changes += additions[step.job_id] != last
        now_s += 1.0 + switch_s * (additions[step.job_id] != last)
        last = additions[step.job_id]
        if step.emit:
            ends_s[step.job_id] = now_s
    assert predicted_s == pytest.approx(ends_s)
    if switch_s < 1.0:
        assert num_changes == {"shortest": 3, "deadline": 4, "fair": 9, "arrival": 9}[policy]  # nine keys have turns


def test_the_first_turns_are_gone_through_to_the_step() -> None:
    """The simulation is exact for the first four steps of each key."""
    subject = scheduler(num_ranks=1, policy=Fair(4.0))
    for key in "abc":
        for number in range(2):
            subject.add(job(f"{key}{number}", key, num_steps=4))
    predicted_s = dict(subject.ends_s())
    assert predicted_s == dict(real_ends_s(subject))


def test_who_ages_goes_before_the_others_in_a_simulation_too() -> None:
    """The long job is overtaken for twice its six seconds; without ageing it would wait for all twenty."""
    subject = scheduler(num_ranks=1, policy=Shortest(2.0))
    subject.add(job("long", num_steps=6))
    for number in range(20):
        subject.add(job(f"short {number}", num_steps=1))
    predicted_s = dict(subject.ends_s())
    assert predicted_s["long"] == dict(real_ends_s(subject))["long"] == 18.0


def test_who_will_be_late_goes_behind_the_others_in_a_simulation_too() -> None:
    """The first job ends after eight seconds; the second then has four seconds left for its six."""
    subject = scheduler(num_ranks=1, policy=Deadline())
    for name, num_steps, deadline_s in (("first", 8, 8.5), ("second", 6, 12.5), ("third", 3, 30.0)):
        subject.add(job(name, num_steps=num_steps, deadline_s=deadline_s))
    assert dict(subject.ends_s()) == {"first": 8.0, "third": 11.0, "second": 17.0}


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_who_asks_changes_nothing(policy: str, elastic: bool) -> None:
    """Predictions change neither the plans nor the policy's state."""
    plans = []
    for asks in (False, True):
        subject = scheduler(num_ranks=2, elastic=elastic, policy=make_policy(policy))
        for number, key in enumerate("aabcab"):
            subject.add(job(str(number), key, num_steps=1 + number % 3), now_s=float(number))
        made = []
        for now_s in range(100):
            if asks:
                subject.finish_times_s(float(now_s), beside=[job("new", "z")])
                subject.finish_times_s(float(now_s))
            made.append(subject.next_plan(now_s=float(now_s)))
        plans.append(made)
    assert plans[0] == plans[1]


class CountingFair(Fair):
    """Counts the calls of ``order`` over all copies."""

    num_orders = 0

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        CountingFair.num_orders += 1
        return super().order(candidates, now_s)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("weight", [1e-6, 1.0])
def test_looks_are_few_however_many_turns_there_are(elastic: bool, weight: float) -> None:
    """There are 200 jobs of 20 keys with 30 steps each."""
    subject = scheduler(num_ranks=2, elastic=elastic, policy=CountingFair())
    for number in range(200):
        own = job(str(number), str(number % 20), num_steps=30, step_s=0.1)
        subject.add(replace(own, weight=weight))
    CountingFair.num_orders = 0
    assert len(subject.finish_times_s()) == 200
    assert CountingFair.num_orders <= 100
