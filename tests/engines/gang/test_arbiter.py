"""The arbiter decides which models are awake: single decisions by hand, and random loads on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.arbiter import FORESEEN_S, IDLE, LINGER_S, MAX_TURN_S, STARVING_S, Arbiter, Demand, Sharer

GIB = 2**30
SWAP_S = 1.0


def sharer(
    name: str,
    gib: float,
    *,
    device: str = "gpu",
    left_gib: float = 1.0,
    working_gib: float = 0.0,
    swap_s: float = SWAP_S,
) -> Sharer:
    awake, asleep, working = ({device: int(size * GIB)} for size in (gib, left_gib, working_gib))
    return Sharer(name=name, awake=awake, asleep=asleep, working=working, swap_s=swap_s)


def arbiter(*sharers: Sharer, gib: float = 80.0) -> Arbiter:
    made = Arbiter({one: int(gib * GIB) for device in sharers for one in device.awake})
    for one in sharers:
        made.add(one)
    return made


def awake(made: Arbiter, *names: str, now_s: float = 0.0) -> Arbiter:
    for name in names:
        made.moved(name, is_awake=True, now_s=now_s)
    return made


def foreseen_s(made: Arbiter, name: str, now_s: float) -> float:
    return made.wake_s(name, now_s, frozenset(one.name for one in made.sharers.values() if one.is_awake))


def work(backlog_s: float, ending_s: float | None = None, slack_s: float | None = None) -> Demand:
    return Demand(backlog_s=backlog_s, ending_s=ending_s, slack_s=slack_s)


def test_those_that_fit_stay_awake_together() -> None:
    made = awake(arbiter(sharer("a", 30), sharer("b", 30), sharer("c", 40)), "a", "b")
    assert made.decide(5.0) == {"a", "b"}
    made.hear("c", work(3.0), 5.0)
    made.hear("b", work(3.0), 5.0)
    assert made.decide(6.0) == {"b", "c"}, "the idle one goes, the other may stay"


def test_nobody_goes_where_there_is_room_or_where_it_would_not_help() -> None:
    made = awake(arbiter(sharer("a", 30), sharer("b", 60), sharer("other", 60, device="gpu2")), "a", "other")
    made.hear("b", work(3.0), 9.0)
    assert made.decide(9.0) == {"b", "other"}
    made = awake(arbiter(sharer("a", 30), sharer("b", 40)), "a")
    made.hear("b", work(3.0), 9.0)
    assert made.decide(9.0) == {"a", "b"}


def test_of_several_idle_ones_those_go_that_are_needed() -> None:
    made = arbiter(sharer("old", 10), sharer("older", 10), sharer("large", 50), sharer("new", 40))
    for name, at_s in (("older", 0.0), ("old", 1.0), ("large", 2.0)):
        awake(made, name, now_s=at_s)
    made.hear("new", work(1.0), 9.0)
    assert made.decide(9.0) == {"old", "older", "new"}, "small ones alone would not be enough"


def test_an_idle_model_lingers_for_its_decoder() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60)), "a")
    made.hear("a", work(1.0), 20.0)
    made.hear("b", work(1.0), 20.0)
    made.hear("a", IDLE, 21.0)
    assert made.decide(21.0 + LINGER_S / 2) == {"a"}
    assert made.decide(21.0 + LINGER_S) == {"b"}


def test_a_turn_lasts_a_multiple_of_a_swap_and_then_ends() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60)), "a")
    made.hear("a", work(30.0), 0.0)
    made.hear("b", work(29.0), 0.1)
    assert made.decide(MAX_TURN_S - 0.1) == {"a"}
    assert made.decide(MAX_TURN_S) == {"b"}
    made.hear("b", work(3.0), 0.2)
    assert made.decide(3.9) == {"a"}
    assert made.decide(4.0) == {"b"}, "little work ends a long turn earlier"


def test_a_deadline_in_danger_ends_a_turn_earlier() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60), sharer("c", 60)), "a")
    made.hear("a", work(5.0), 0.0)
    made.hear("b", work(2.0), 0.1)
    made.hear("c", work(9.0, slack_s=3.0), 0.2)
    assert made.decide(4.0) == {"c"}
    made.hear("c", work(9.0, slack_s=300.0), 0.2)
    assert made.decide(10.0) == {"b"}


def test_the_last_steps_of_a_job_are_not_interrupted() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60)), "a")
    made.hear("a", work(30.0, ending_s=0.9), 20.0)
    made.hear("b", work(1.0), 20.0)
    assert made.decide(20.5) == {"a"}
    made.hear("a", work(30.0, ending_s=5.0), 20.6)
    assert made.decide(20.7) == {"b"}, "the job has ended"
    made.hear("a", work(30.0, ending_s=0.9), 20.8)
    assert made.decide(20.9) == {"a"}
    assert made.decide(20.0 + SWAP_S) == {"b"}, "the time for that is given once"


def test_a_starving_model_comes_before_short_work_and_keeps_the_room_for_itself() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("big", 75), sharer("small", 10)), "a")
    made.hear("big", work(500.0), 0.0)
    made.hear("a", work(500.0), STARVING_S - 1)
    made.moved("a", is_awake=False, now_s=STARVING_S)
    awake(made, "a", now_s=STARVING_S)
    made.hear("small", work(0.1), STARVING_S)
    assert made.decide(STARVING_S + 1) == {"a"}, "small would fit, and would keep big waiting"
    assert made.decide(STARVING_S + 4 * SWAP_S) == {"big"}


def test_a_model_too_large_for_its_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a takes 90\.0 GiB on gpu, of which 80\.0 GiB are usable: divide"):
        arbiter(sharer("a", 90))


def test_one_model_runs_even_if_what_others_leave_was_more_than_thought() -> None:
    made = arbiter(sharer("a", 75, left_gib=10), sharer("b", 75, left_gib=10))
    made.hear("a", work(1.0), 0.0)
    assert made.decide(0.0) == {"a"}


def test_a_swap_that_was_not_measured_is_estimated_by_its_bytes() -> None:
    one = Sharer(name="a", awake={"gpu": 21 * GIB}, asleep={"gpu": GIB})
    assert one.cost_s == pytest.approx(2 * 20 * GIB / 20e9)


def test_a_wake_up_is_foreseen_with_the_turn_of_the_other_and_the_swap() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60), sharer("small", 5)), "a")
    assert foreseen_s(made, "a", 50.0) == 0.0
    assert foreseen_s(made, "small", 50.0) == SWAP_S / 2, "there is room"
    assert foreseen_s(made, "b", 50.0) == SWAP_S, "the other is idle"
    made.hear("a", work(3.0), 50.0)
    assert foreseen_s(made, "b", 50.0) == SWAP_S, "the turn was long enough"
    made.moved("a", is_awake=False, now_s=50.0)
    awake(made, "a", now_s=50.0)
    assert foreseen_s(made, "b", 50.0) == pytest.approx(3.0 + LINGER_S + SWAP_S, abs=2 * LINGER_S)
    made.hear("b", work(400.0), 51.0)
    made.hear("a", work(400.0), 51.0)
    assert foreseen_s(made, "b", 51.0) == pytest.approx(MAX_TURN_S - 1.0 + SWAP_S, abs=1.5), "the turn is over then"
    assert made.wake_s("a", 51.0, frozenset("b")) == pytest.approx(SWAP_S + MAX_TURN_S + SWAP_S, abs=1.5), "it leaves"
    assert made.wake_s("b", 51.0, frozenset("b")) == SWAP_S, "it comes"
    assert made.sharers["b"].demand == work(400.0), "nothing has happened"
    assert not made.sharers["b"].is_awake


def test_a_model_without_work_is_foreseen_with_as_much_as_it_had_last_time() -> None:
    """A model with little work ends its turn earlier."""
    made = awake(arbiter(sharer("a", 60), sharer("b", 60)), "a")
    predicted_s = []
    for backlog_s in (1.0, 400.0):
        for demand in (work(backlog_s), IDLE):
            made.hear("b", demand, -99.0)
        made.hear("a", work(400.0), 0.0)
        predicted_s.append(foreseen_s(made, "b", 0.5))
    assert predicted_s[0] + 4.0 < predicted_s[1]


def test_a_wake_up_behind_other_models_is_foreseen_only_so_far() -> None:
    made = awake(arbiter(*(sharer(f"m{i}", 60, swap_s=20.0) for i in range(9))), "m0")
    for i in range(8):
        made.hear(f"m{i}", work(500.0), 0.0)
    made.hear("m8", work(9000.0), 0.1)
    assert FORESEEN_S < foreseen_s(made, "m8", 0.1) < 2 * FORESEEN_S


# Whole loads.


@dataclass(frozen=True, kw_only=True)
class Job:
    at_s: float
    model: int
    work_s: float


@dataclass(kw_only=True)
class Simulation:
    """Models that swap in ``SWAP_S`` and do their jobs in order. Interrupted jobs go on later."""

    sizes_gib: Sequence[float]
    jobs: Sequence[Job]
    working_gib: Sequence[float] = ()
    """Working memory of each model beside its size; empty: none."""
    tick_s: float = 0.05
    first: str | None = None
    """The model that is awake at the start."""
    first_waits_s: dict[str, float] = field(default_factory=dict)
    """Time at which each other model first woke up."""
    waits_s: list[float] = field(default_factory=list)
    """Times that models with work have waited for a turn."""
    num_swaps: int = 0
    work_s: float = 0.0
    end_s: float = 0.0

    def run(self) -> Simulation:
        names = [f"m{i}" for i in range(len(self.sizes_gib))]
        working_gib = self.working_gib or [0.0] * len(names)
        sizes = dict(zip(names, zip(self.sizes_gib, working_gib, strict=True), strict=True))
        made = arbiter(*(sharer(name, gib, working_gib=extra) for name, (gib, extra) in sizes.items()))
        queues: dict[str, list[float]] = {name: [] for name in names}
        coming, now_s, busy_until_s = sorted(self.jobs, key=lambda job: job.at_s), 0.0, 0.0
        target: frozenset[str] | None = None
        if self.first is not None:
            awake(made, self.first)
        while coming or any(queues.values()):
            while coming and coming[0].at_s <= now_s:
                job = coming.pop(0)
                queues[names[job.model]].append(job.work_s)
            for name, queue in queues.items():
                made.hear(name, work(sum(queue), queue[0] if queue and made.sharers[name].is_awake else None), now_s)
            if target is None:
                target = made.decide(now_s)
                moving = target ^ {name for name in names if made.sharers[name].is_awake}
                busy_until_s = now_s + (SWAP_S if moving else 0.0)
                for name in moving - target:
                    self._check_leaving(made.sharers[name], now_s)
            if now_s >= busy_until_s:
                self._move(made, target, now_s)
                target = None
            running = [name for name in names if made.sharers[name].is_awake and (target is None or name in target)]
            assert len(running) == 1 or sum(sum(sizes[name]) for name in running) <= 80
            for name in running:
                self._work(queues[name])
            now_s += self.tick_s
            assert now_s < 10_000, "nothing goes on"
        self.end_s = now_s
        return self

    def _move(self, made: Arbiter, target: frozenset[str], now_s: float) -> None:
        for name, one in made.sharers.items():
            if one.is_awake != (name in target):
                self.num_swaps += name in target
                if name in target and one.waits_since_s is not None:
                    self.waits_s.append(now_s - one.waits_since_s)
                    if name != self.first:
                        self.first_waits_s.setdefault(name, now_s)
                made.moved(name, is_awake=name in target, now_s=now_s)

    def _check_leaving(self, leaving: Sharer, now_s: float) -> None:
        """Check the hysteresis: with work left, a turn lasted long enough."""
        if leaving.demand.backlog_s:
            assert now_s - leaving.turn_since_s >= leaving.min_turn_s - 1e-6

    def _work(self, queue: list[float]) -> None:
        if queue:
            queue[0] -= self.tick_s
            self.work_s += self.tick_s
            if queue[0] <= 1e-9:
                queue.pop(0)


@settings(max_examples=40, deadline=None)
@given(
    sizes_gib=st.lists(st.tuples(st.integers(5, 78), st.integers(0, 40)), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
    longest_s=st.sampled_from((0.4, 3.0, 40.0)),
    busiest=st.floats(0.2, 1.0),
)
def test_every_model_with_work_is_awake_within_a_bound(
    sizes_gib: list[tuple[int, int]], seed: int, longest_s: float, busiest: float
) -> None:
    """The load is 1.5 times the GPUs' capacity; the first model has at least the share ``busiest`` of it.

    The work of a lone model may take more memory than is left beside its weights.
    """
    num, random, loads, at_s = len(sizes_gib), Random(seed), [], 0.0
    while at_s < 100.0:
        model = 0 if random.random() < busiest else random.randrange(num)
        loads.append(Job(at_s=at_s, model=model, work_s=random.uniform(0.1, longest_s)))
        at_s += loads[-1].work_s / 1.5
    own_gib, working_gib = zip(*sizes_gib, strict=True)
    simulation = Simulation(sizes_gib=own_gib, working_gib=working_gib, jobs=loads).run()
    turn_s = 4 * SWAP_S + SWAP_S  # the shortest turn, and the grace for a job near its end
    bound_s = STARVING_S + MAX_TURN_S + num * (turn_s + 2 * SWAP_S + 0.2)
    assert max(simulation.waits_s, default=0.0) <= bound_s


@pytest.mark.parametrize("seed", range(5))
def test_foreseen_wake_ups_come_true(seed: int) -> None:
    """All models have all their work at once, and no two fit together."""
    random = Random(seed)
    jobs = [Job(at_s=0.0, model=model, work_s=random.uniform(0.5, 20.0)) for model in range(4)]
    made = awake(arbiter(*(sharer(f"m{i}", 60) for i in range(4))), "m0")
    for job in jobs:
        made.hear(f"m{job.model}", work(job.work_s), 0.0)
    predicted_s = sorted(foreseen_s(made, f"m{i}", 0.0) for i in range(4))
    simulation = Simulation(sizes_gib=(60,) * 4, jobs=jobs, first="m0").run()
    waited_s = sorted(simulation.first_waits_s.values())
    assert predicted_s == pytest.approx([0.0, *waited_s], rel=0.25, abs=0.5)


def test_swaps_take_a_small_share_of_a_full_load() -> None:
    random = Random(1)
    jobs = [Job(at_s=random.uniform(0, 60), model=random.randrange(3), work_s=2.0) for _ in range(60)]
    simulation = Simulation(sizes_gib=(60, 60, 60), jobs=jobs).run()
    assert simulation.num_swaps * SWAP_S < 0.25 * simulation.work_s
    assert simulation.end_s < 1.3 * simulation.work_s


def test_it_is_looked_at_again_when_a_turn_may_be_over() -> None:
    made = awake(arbiter(sharer("a", 60), sharer("b", 60)), "a")
    assert made.next_s(0.0) is None
    made.hear("a", work(50.0), 0.0)
    made.hear("b", work(50.0), 0.0)
    assert made.next_s(3.9) == pytest.approx(0.1)
    assert made.next_s(5.0) == LINGER_S
    made.moved("a", is_awake=False, now_s=6.0)
    assert made.next_s(99.0) == LINGER_S
