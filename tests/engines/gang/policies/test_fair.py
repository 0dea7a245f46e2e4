"""By the plans alone, keys with jobs get equal shares, or shares by weight."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.jobs.job import Job
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.policies.fair import Fair
from tests.engines.gang.support.plans import scheduler
from tests.support.unhurried import UNHURRIED

QUANTUM_S = 4.0


def add(
    subject: Scheduler,
    name: str,
    key: str,
    *,
    step_s: float = 1.0,
    num_steps: int = 3,
    weight: float = 1.0,
    exclusive: bool = False,
) -> None:
    own = {"request": None, "conditioning": None, "estimates_s": {1: step_s}, "exclusive": exclusive}
    subject.add(Job(job_id=name, num_steps=num_steps, key=key, weight=weight, **own))  # type: ignore[arg-type]


def served_s(subject: Scheduler, lengths: dict[str, float], num_plans: int) -> Counter[str]:
    """Return the seconds by key in ``num_plans`` plans. A job's first letter is its key."""
    seconds: Counter[str] = Counter()
    for _ in range(num_plans):
        plan = subject.next_plan()
        assert plan is not None
        (work,) = plan.works
        key = work.job_ids[0][0]
        seconds[key] += lengths[key]  # type: ignore[assignment]
    return seconds


@settings(**UNHURRIED, max_examples=30)
@given(
    step_s=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0, 7.0])] * 3),
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 5.0])] * 3),
    num_steps=st.integers(1, 9),
)
def test_shares_are_as_weights_say(
    step_s: tuple[float, float, float], weights: tuple[float, float, float], num_steps: int
) -> None:
    """This holds for any step length and number of steps, within a turn and a step of each key."""
    subject = scheduler(num_ranks=1, max_running_jobs=10_000, policy=Fair(QUANTUM_S))
    lengths = dict(zip("abc", step_s, strict=True))
    for key, weight in zip("abc", weights, strict=True):
        for i in range(80 // num_steps + 1):
            add(subject, f"{key}{i}", key, step_s=lengths[key], num_steps=num_steps, weight=weight)
    seconds = served_s(subject, lengths, 80)
    rounds = [seconds[key] / (QUANTUM_S * weight) for key, weight in zip("abc", weights, strict=True)]
    slack = 1 + max(step / QUANTUM_S for step in step_s)
    assert max(rounds) - min(rounds) <= 2 * slack


def test_who_asks_for_much_does_not_hold_up_who_asks_for_little() -> None:
    subject = scheduler(num_ranks=1, policy=Fair(QUANTUM_S))
    for i in range(20):
        add(subject, f"m{i}", "much")
    subject.next_plan()
    add(subject, "l", "little")
    order = [work.job_ids[0] for plan in iter(subject.next_plan, None) for work in plan.works]
    assert order.index("l") <= QUANTUM_S


class FewTurns(Fair):
    """Fails if turns are iterated one by one."""

    num_turns = 0

    def _turn_s(self, key: str) -> float:
        self.num_turns += 1
        assert self.num_turns < 100
        return super()._turn_s(key)


def test_a_step_may_last_for_a_billion_turns() -> None:
    """The key with three times the weight gets three times the steps."""
    subject = scheduler(num_ranks=1, policy=FewTurns(1.0))
    add(subject, "a", "least", weight=1e-9)
    add(subject, "b", "little", weight=3e-9, num_steps=4)
    order = [work.job_ids[0] for plan in iter(subject.next_plan, None) for work in plan.works]
    assert order == ["a", "b", "b", "b", "a", "b", "a"]


def test_a_key_without_jobs_saves_nothing() -> None:
    """It returns after a long time and gets no more than its turn."""
    subject = scheduler(num_ranks=1, max_running_jobs=100, policy=Fair(QUANTUM_S))
    add(subject, "b0", "b", num_steps=1)
    for i in range(40):
        add(subject, f"a{i}", "a")
    served_s(subject, {"a": 1.0, "b": 1.0}, 60)
    for i in range(20):
        add(subject, f"b{i + 1}", "b")
    seconds = served_s(subject, {"a": 1.0, "b": 1.0}, 16)
    assert abs(seconds["a"] - seconds["b"]) <= QUANTUM_S


def test_keys_owe_what_they_owe_also_while_a_job_runs_alone() -> None:
    """One step of the first key is worth eight of the second one's, whatever is served between."""
    subject = scheduler(num_ranks=1, policy=Fair(QUANTUM_S))
    add(subject, "a0", "a", step_s=10.0, num_steps=1)
    add(subject, "x", "x", exclusive=True)
    add(subject, "a1", "a", step_s=10.0, num_steps=1)
    add(subject, "b", "b", num_steps=9)
    order = [work.job_ids[0] for plan in iter(subject.next_plan, None) for work in plan.works]
    assert order == ["a0", *3 * ["x"], *8 * ["b"], "a1", "b"]
