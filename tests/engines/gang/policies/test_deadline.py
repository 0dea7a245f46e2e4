"""Deadlines that can be met come before those that cannot; the teams chosen make the fewest jobs late."""

from __future__ import annotations

from engines.gang.jobs.job import Job
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.policies.deadline import Deadline
from tests.engines.gang.support.plans import scheduler

HALF = {1: 1.0, 2: 0.6}
"""Seconds of a step by team size: two ranks are 1.67 times as fast as one."""


def due(job_id: str, deadline_s: float | None, num_steps: int = 4, **fields: object) -> Job:
    own = {"request": None, "conditioning": None, "estimates_s": HALF, **fields}
    return Job(job_id=job_id, num_steps=num_steps, deadline_s=deadline_s, **own)  # type: ignore[arg-type]


def order_of(subject: Scheduler, now_s: float = 0.0) -> list[str]:
    """Return each job once, in the order of their ends; time passes as predicted."""
    ends = []
    while plan := subject.next_plan(now_s=now_s):
        now_s += max(HALF[work.num_ranks] for work in plan.works)
        ends += [step.job_id for work in plan.works for step in work.job_steps if step.emit == "final"]
    return ends


def test_the_earliest_deadline_goes_first() -> None:
    subject = scheduler(num_ranks=2, policy=Deadline())
    for name, deadline_s in (("late", 30.0), ("soon", 5.0), ("between", 10.0)):
        subject.add(due(name, deadline_s))
    assert order_of(subject) == ["soon", "between", "late"]


def test_who_cannot_be_in_time_any_more_goes_last() -> None:
    subject = scheduler(num_ranks=2, policy=Deadline())
    for name, deadline_s in (("hopeless", 1.0), ("possible", 9.0)):
        subject.add(due(name, deadline_s))
    assert order_of(subject) == ["possible", "hopeless"]


def test_who_takes_long_to_decode_is_due_earlier() -> None:
    subject = scheduler(num_ranks=2, policy=Deadline())
    subject.add(due("picture", 9.0))
    subject.add(due("clip", 14.0, decode_s=8.0))
    assert order_of(subject) == ["clip", "picture"]


def test_a_deadline_counts_from_when_the_job_came() -> None:
    subject = scheduler(num_ranks=2, policy=Deadline())
    subject.add(due("early", 20.0), now_s=100.0)
    subject.add(due("late", 11.0), now_s=110.0)
    assert order_of(subject, now_s=110.0) == ["early", "late"]


def test_a_job_without_a_deadline_is_to_be_done_in_three_times_its_own_time() -> None:
    """Its 4 steps take 2.4 s, so it is due after 7.2 s."""
    for deadline_s, expected in ((7.0, ["said", "silent"]), (7.4, ["silent", "said"])):
        subject = scheduler(num_ranks=2, policy=Deadline())
        subject.add(due("silent", None))
        subject.add(due("said", deadline_s))
        assert order_of(subject) == expected


NEARLY_TWICE = {1: 1.0, 2: 0.51}
"""Two ranks are 1.96 times as fast as one: the total wait is least one after the other."""


def teams_of(*jobs: Job) -> dict[str, tuple[int, ...]]:
    """Return the teams in the first plan of an elastic gang of two ranks."""
    subject = scheduler(num_ranks=2, elastic=True, policy=Deadline())
    for one in jobs:
        subject.add(one)
    plan = subject.next_plan()
    assert plan is not None
    return {work.job_ids[0]: work.ranks for work in plan.works}


def test_teams_are_those_by_which_fewest_are_late() -> None:
    """One rank is enough for both if there is time; else the job that is due first gets both."""
    assert teams_of(due("a", 4.5), due("b", 4.5)) == {"a": (0,), "b": (1,)}
    assert teams_of(due("a", 3.0), due("b", 4.5)) == {"a": (0, 1)}


def test_where_all_are_in_time_anyway_all_wait_least() -> None:
    """A job that would be in time on one rank gets both, before another that has time as well."""
    far = [due(name, 100.0, estimates_s=NEARLY_TWICE) for name in "ab"]
    assert teams_of(*far) == {"a": (0, 1)}
    assert teams_of(far[0]) == {"a": (0, 1)}


def test_who_is_too_late_anyway_gets_what_the_others_can_spare() -> None:
    """It gets one rank if the other is enough for the punctual job; else nothing, though it came first."""
    hopeless = due("hopeless", 0.5, num_steps=2)
    assert teams_of(hopeless, due("possible", 3.0)) == {"possible": (0, 1)}
    little = {1: 1.0, 2: 0.7}
    spared = teams_of(due("hopeless", 0.5, estimates_s=little), due("possible", 9.0, estimates_s=little))
    assert {job_id: len(ranks) for job_id, ranks in spared.items()} == {"possible": 1, "hopeless": 1}
