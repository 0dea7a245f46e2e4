"""No job is overtaken for ever, whatever jobs arrive in whatever order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.eta.prediction import StepPrediction
from engines.gang.jobs.job import Job
from engines.gang.policies.deadline import Deadline
from engines.gang.policies.policy import Policy
from engines.gang.policies.shortest import Shortest
from tests.engines.gang.support.plans import job, scheduler
from tests.support.unhurried import UNHURRIED

MAX_OVERTAKEN = 3.0
SWITCH_S = 2.0
"""Seconds that a change of additions to the weights takes."""
STEP_S = {"short": 1.0, "usual": 3.5, "long": 20.0}
"""Step time on one rank. A team of w takes w ** -0.8 of it."""


@dataclass(frozen=True, kw_only=True)
class Come:
    """A job that arrives after ``num_plans_before`` plans."""

    shape: str
    num_steps: int
    num_plans_before: int
    priority: float = 1.0
    additions: str = ""

    def whole_s(self, num_ranks: int) -> float:
        return self.num_steps * step_s(self.shape, num_ranks)


COMES = st.builds(
    Come,
    shape=st.sampled_from(sorted(STEP_S)),
    num_steps=st.integers(1, 6),
    num_plans_before=st.integers(0, 8),
    priority=st.sampled_from([0.25, 1.0, 4.0]),
    additions=st.sampled_from(["", "", "one", "two"]),
)


def step_s(shape: str, num_ranks: int) -> float:
    return STEP_S[shape] / float(num_ranks**0.8)


def job_of(job_id: str, come: Come) -> Job:
    return Job(
        job_id=job_id,
        request=None,
        conditioning=None,
        num_steps=come.num_steps,
        priority=come.priority,
        additions=come.additions or (),
        estimates_s={size: step_s(come.shape, size) for size in (1, 2, 4)},
    )


ROUNDING = 1e-12
"""Allowed difference of sums of times: the policy adds the same times in another order."""


@dataclass(kw_only=True)
class Wait:
    """One job's wait: gang-seconds that later jobs had in plans without it. From the time its limit is reached:
    ``late_by`` names the later jobs served, ``with_room`` those served while it had room to run. ``had_begun`` are the
    later jobs that had begun by then.
    """

    limit_s: float
    overtaken_s: float = 0.0
    had_begun: set[int] | None = None
    late_by: set[int] = field(default_factory=set)
    with_room: set[int] = field(default_factory=set)

    def note(self, by: dict[int, float], begun: set[int], *, has_room: bool) -> None:
        if self.had_begun is not None:
            self.late_by |= by.keys()
            self.with_room |= by.keys() if has_room else set()
        self.overtaken_s += sum(by.values())
        if self.had_begun is None and self.overtaken_s >= self.limit_s * (1 + ROUNDING):
            self.had_begun = begun


class Waits:
    """Measures by the plans alone how long each job waits for later ones."""

    def __init__(self, comes: list[Come], policy: Policy, *, num_ranks: int, elastic: bool, max_running: int) -> None:
        self._comes, self._num_ranks, self._max_running = comes, num_ranks, max_running
        self._subject = scheduler(
            num_ranks=num_ranks,
            max_running_jobs=max_running,
            elastic=elastic,
            policy=policy,
            prediction=StepPrediction(switch_s=SWITCH_S),
        )
        self._additions: dict[int, str] = {}
        """Additions to the weights by rank."""
        self._begun: set[int] = set()
        self._open: set[int] = set()
        self._now_s = 0.0
        self.waits: dict[int, Wait] = {}

    def run(self, max_overtaken: float) -> dict[int, Wait]:
        for number, come in enumerate(self._comes):
            for _ in range(come.num_plans_before):
                self._go_on()
            self._subject.add(job_of(str(number), come), now_s=self._now_s)
            self._open.add(number)
            self.waits[number] = Wait(limit_s=max_overtaken * come.whole_s(self._num_ranks) / come.priority)
        while self._go_on():
            pass
        assert not self._open
        return self.waits

    def _go_on(self) -> bool:
        plan = self._subject.next_plan(now_s=self._now_s)
        if plan is None:
            return False
        teams = {int(step.job_id): work.ranks for work in plan.works for step in work.job_steps}
        served = {number: self._team_s(number, ranks) for number, ranks in teams.items()}
        self._begun |= served.keys()
        is_full = len(self._begun & self._open) >= self._max_running
        for waiting in self._open - served.keys():
            by = {
                other: team_s * len(teams[other]) / self._num_ranks
                for other, team_s in served.items()
                if other > waiting
            }
            begun = {other for other in self._begun & self._open if other > waiting}
            self.waits[waiting].note(by, begun, has_room=waiting in self._begun or not is_full)
        self._now_s += max(served.values())
        finals = {int(step.job_id) for work in plan.works for step in work.job_steps if step.emit == "final"}
        self._open -= finals
        return True

    def _team_s(self, number: int, ranks: tuple[int, ...]) -> float:
        """Return the seconds of a step and of the change of weights before it."""
        come = self._comes[number]
        changes = any(self._additions.get(rank, "") != come.additions for rank in ranks)
        self._additions |= dict.fromkeys(ranks, come.additions)
        return step_s(come.shape, len(ranks)) + changes * SWITCH_S


@pytest.mark.parametrize("kind", [Shortest, Deadline])
@settings(**UNHURRIED)
@given(
    comes=st.lists(COMES, min_size=1, max_size=32),
    max_overtaken=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
    num_ranks=st.sampled_from([1, 2, 4]),
    elastic=st.booleans(),
    max_running=st.integers(1, 4),
)
def test_no_job_is_overtaken_for_longer_than_its_bound(
    kind: type[Shortest | Deadline],
    comes: list[Come],
    max_overtaken: float,
    num_ranks: int,
    elastic: bool,
    max_running: int,
) -> None:
    """The bound is a multiple of its own time, by priority, plus the step that reaches it. After that only later jobs
    that had begun are served without it, while all places are taken."""
    subject = Waits(comes, kind(max_overtaken), num_ranks=num_ranks, elastic=elastic, max_running=max_running)
    for wait in subject.run(max_overtaken).values():
        assert not wait.with_room
        assert wait.late_by <= (wait.had_begun or set())


LONG_AND_A_STREAM = [
    Come(shape="long", num_steps=2, num_plans_before=0),
    *(Come(shape="short", num_steps=2, num_plans_before=2 * (i > 0)) for i in range(200)),
]


@pytest.mark.parametrize(
    ("policy", "priority", "expected_s"),
    [
        (Shortest(MAX_OVERTAKEN), 1.0, MAX_OVERTAKEN * 40),
        (Shortest(math.inf), 1.0, 398),
        (Shortest(), 1.0, 6 * 40),
        (Shortest(), 4.0, 1.5 * 40),
        (Shortest(3.0), 0.5, 6 * 40),
        (Deadline(), 1.0, 6 * 40),
    ],
)
def test_a_stream_of_short_jobs_delays_a_long_one_to_its_bound_and_no_further(
    policy: Policy, priority: float, expected_s: float
) -> None:
    """Without ageing it would wait for all of them; ``docs/scale/policies.md`` says six times, by priorities."""
    comes = [replace(LONG_AND_A_STREAM[0], priority=priority), *LONG_AND_A_STREAM[1:]]
    waits = Waits(comes, policy, num_ranks=1, elastic=False, max_running=4).run(math.inf)
    assert abs(waits[0].overtaken_s - expected_s) <= 2


def test_jobs_with_the_additions_of_the_last_one_do_not_starve_others() -> None:
    """Without ageing the job with an adapter would wait for all 200 that need no change of weights."""
    comes = [
        Come(shape="short", num_steps=2, num_plans_before=0),
        Come(shape="short", num_steps=2, num_plans_before=1, additions="one"),
        *(Come(shape="short", num_steps=2, num_plans_before=2 * (i > 0)) for i in range(200)),
    ]
    waits = [
        Waits(comes, Shortest(limit), num_ranks=1, elastic=False, max_running=4).run(math.inf)[1]
        for limit in (MAX_OVERTAKEN, math.inf)
    ]
    assert [wait.overtaken_s for wait in waits] == [MAX_OVERTAKEN * 2, 400]


def test_a_job_that_has_aged_need_not_wait_for_the_end_of_another() -> None:
    """The aged job takes 40 s on one rank; the other has 30 steps of 1 s and had 10 s of the gang."""
    comes = [
        Come(shape="long", num_steps=2, num_plans_before=0),
        Come(shape="short", num_steps=30, num_plans_before=0),
    ]
    waits = Waits(comes, Shortest(0.25), num_ranks=2, elastic=True, max_running=4).run(math.inf)
    limit_s = 0.25 * comes[0].whole_s(2)
    assert limit_s <= waits[0].overtaken_s <= limit_s + step_s("short", 2)


def test_a_priority_shortens_the_wait_and_a_low_one_lengthens_it() -> None:
    """Whole pictures of equal length arrive together: a quarter of the time counts as a shorter job."""
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
