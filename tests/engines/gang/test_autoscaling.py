"""Autoscaling sets the number of a model's gangs, on traces of traffic and on random traffic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.autoscaling import (
    ALERT_SHARE,
    LATE_SHARE,
    UNHEARD,
    ArrivalHistory,
    GangReport,
    GangScaler,
    Observation,
    RankDemand,
    ScalingRules,
    StartTimes,
    gangs_needed,
    share_ranks,
)
from tests.support.unhurried import UNHURRIED

START_S = 30.0
JOB_S = 2.0
TICK_S = 2.0
RULES = ScalingRules(target_wait_s=10.0, min_gangs=1, max_gangs=20)


@dataclass
class FluidGang:
    ready_s: float
    backlog_s: float = 0.0
    num: float = 0.0


@dataclass
class Fluid:
    """Gangs that do one second of work a second. A job goes to the gang with the least work."""

    scaler: GangScaler
    start_s: float = START_S
    now_s: float = 0.0
    target: int = 0
    gangs: dict[str, FluidGang] = field(default_factory=dict)
    waiting: float = 0.0
    worst_wait_s: float = 0.0
    targets: list[tuple[float, int]] = field(default_factory=list)
    num_made: int = 0

    def running(self) -> dict[str, FluidGang]:
        return {name: gang for name, gang in self.gangs.items() if gang.ready_s <= self.now_s}

    def tick(self, load: float, spare_s: float = math.inf, granted: int | None = None) -> int:
        """Simulate a tick in which ``load`` seconds of work a second arrive."""
        self.now_s += TICK_S
        running = self.running()
        for gang in running.values():
            gang.backlog_s = max(0.0, gang.backlog_s - TICK_S)
        self.waiting += load * TICK_S / JOB_S
        while self.waiting >= 1 and running:
            self.waiting -= 1
            gang = min(running.values(), key=lambda one: one.backlog_s)
            self.worst_wait_s = max(self.worst_wait_s, gang.backlog_s)
            gang.backlog_s += JOB_S
            gang.num += 1
        reports = {
            name: GangReport(
                backlog_s=gang.backlog_s,
                num_jobs=math.ceil(gang.backlog_s / JOB_S),
                num_arrived=gang.num,
                arrived_s=gang.num * JOB_S,
                arrived_s2=gang.num * JOB_S**2,
                spare_s=spare_s,
            )
            for name, gang in running.items()
        }
        unassigned = 0.0 if running else float(math.floor(self.waiting))
        seen = Observation(now_s=self.now_s, target=self.target, gangs=reports, num_unassigned=unassigned)
        self.follow(self.scaler.decide(seen, granted))
        return self.target

    def follow(self, target: int) -> None:
        if target != self.target:
            self.targets.append((self.now_s, target))
        self.target = target
        for _ in range(target - len(self.gangs)):
            self.gangs[f"gang{self.num_made}"] = FluidGang(self.now_s + self.start_s)
            self.num_made += 1
        for name in list(reversed(self.gangs))[: len(self.gangs) - target]:
            del self.gangs[name]

    def run(self, seconds: float, load: Callable[[float], float]) -> int:
        begin_s = self.now_s
        while self.now_s - begin_s < seconds:
            self.tick(load(self.now_s - begin_s))
        return self.target

    def num_reversals(self) -> int:
        """Return how often the target fell right after it had risen."""
        values = [target for _, target in self.targets]
        moves = [later - earlier for earlier, later in pairwise(values)]
        return sum(a > 0 > b for a, b in pairwise(moves))


def fluid(rules: ScalingRules = RULES, start_s: float = START_S) -> Fluid:
    return Fluid(GangScaler(rules), start_s=start_s)


def test_a_step_of_load_brings_gangs_for_it_and_its_end_takes_them() -> None:
    trace = fluid()
    assert trace.run(600, lambda _: 0.2) == 1
    trace.run(900, lambda _: 6.0)
    assert 7 <= trace.target <= 10, "the load, and room for chance"
    trace.worst_wait_s = 0.0
    trace.run(600, lambda _: 6.0)
    assert trace.worst_wait_s <= RULES.target_wait_s
    trace.run(600, lambda _: 0.2)
    assert trace.target == 1


def test_nodes_are_filled_and_an_idle_model_still_goes_to_zero() -> None:
    rules = ScalingRules(target_wait_s=10.0, min_gangs=0, max_gangs=10, idle_s=60.0)
    alone, filled = fluid(rules), fluid(replace(rules, gangs_per_node=4))
    for trace in (alone, filled):
        trace.run(900, lambda _: 4.5)
    assert 4 < alone.target <= 8
    assert filled.target == 8
    for trace in (alone, filled):
        trace.run(900, lambda _: 0.0)
    assert alone.target == filled.target == 0
    full = fluid(replace(rules, gangs_per_node=4))
    full.run(900, lambda _: 9.0)
    assert full.target == 10, "the limit counts"


def test_a_step_is_answered_before_the_target_wait_is_over() -> None:
    """A gang that starts at once comes before any job waits for long."""
    trace = fluid(start_s=0.0)
    trace.run(600, lambda _: 0.5)
    trace.run(600, lambda _: 2.0)
    assert trace.worst_wait_s <= RULES.target_wait_s


def test_a_slow_ramp_is_followed_without_a_late_request() -> None:
    trace = fluid()
    trace.run(300, lambda _: 0.5)
    trace.worst_wait_s = 0.0
    trace.run(3600, lambda at_s: 0.5 + 9.5 * at_s / 3600)
    assert trace.worst_wait_s <= RULES.target_wait_s
    assert trace.num_reversals() == 0
    assert 11 <= trace.target <= 14


def test_a_sawtooth_within_the_hold_makes_no_gang_come_and_go() -> None:
    trace = fluid()
    trace.run(600, lambda at_s: 8.0 if at_s % 40 < 20 else 0.0)
    trace.targets.clear()
    trace.run(3600, lambda at_s: 8.0 if at_s % 40 < 20 else 0.0)
    assert trace.num_reversals() == 0


def test_a_short_burst_is_worked_off_by_the_gangs_that_are_there() -> None:
    """The burst is over before a gang could start."""
    trace = fluid(start_s=300.0)
    trace.run(3600, lambda _: 0.5)
    num_before = trace.target
    trace.run(10, lambda _: 2.5)
    trace.run(600, lambda _: 0.5)
    assert trace.target == num_before


def test_from_zero_a_request_brings_a_gang_and_idle_time_ends_it() -> None:
    trace = fluid(ScalingRules(target_wait_s=10.0, min_gangs=0, max_gangs=4, idle_s=120.0))
    assert trace.run(100, lambda _: 0.0) == 0
    assert trace.tick(1.0) == 1
    trace.run(100, lambda _: 0.3)
    last_s = trace.now_s
    while trace.target:
        trace.tick(0.0)
    assert 110.0 <= trace.now_s - last_s <= 124.0, "the last request came up to 7 s before"


def test_a_gang_with_a_long_job_is_not_ended_for_idleness() -> None:
    scaler = GangScaler(ScalingRules(target_wait_s=10.0, min_gangs=0, max_gangs=4, idle_s=5.0))
    busy = GangReport(backlog_s=900.0, num_jobs=1, num_arrived=1, arrived_s=900.0)
    for now_s in range(0, 800, 10):
        assert scaler.decide(Observation(now_s=now_s, target=1, gangs={"a": busy})) >= 1


@pytest.mark.parametrize(
    ("nodes", "busy", "num_idle"),
    [("AAA", "a", 2), ("AAA", "c", 0), ("ABC", "a", 0), ("ABC", "c", 2), ("AAB", "b", 1), ("ABB", "a", 0)],
)
def test_no_gang_with_a_job_is_among_those_that_ray_serve_ends(nodes: str, busy: str, num_idle: int) -> None:
    """Serve ends the emptiest node first, the oldest of equal ones, and the newest gang of a node."""
    gangs = {
        name: GangReport(num_jobs=int(name == busy), node=float(ord(node)))
        for name, node in zip("abc", nodes, strict=True)
    }
    assert Observation(now_s=0.0, target=3, gangs=gangs).num_idle == num_idle


def test_no_gang_is_idle_while_the_node_of_another_is_unknown() -> None:
    """It may be the newest of the same node, which Serve ends first."""
    gangs = {"a": GangReport(node=1.0), "b": UNHEARD}
    assert Observation(now_s=0.0, target=2, gangs=gangs).num_idle == 0
    assert Observation(now_s=0.0, target=2, gangs={"b": UNHEARD, "a": GangReport()}).num_idle == 1, "no node"


def test_deadlines_shorten_the_wait_that_is_aimed_at() -> None:
    patient, pressed = fluid(), fluid()
    for _ in range(600):
        patient.tick(5.0)
        pressed.tick(5.0, spare_s=1.0)
    assert pressed.target > patient.target


def test_gangs_are_ordered_earlier_if_they_take_longer_to_start() -> None:
    ordered_s = {}
    for start_s in (5.0, 200.0):
        trace = fluid(start_s=start_s)
        trace.run(1800, lambda _: 0.5)
        trace.targets.clear()
        trace.run(1800, lambda at_s: 0.5 + at_s / 300)
        ordered_s[start_s] = next(at_s for at_s, target in trace.targets if target >= 5)
    assert ordered_s[200.0] < ordered_s[5.0]


def test_a_start_is_measured_from_the_order_and_its_median_kept() -> None:
    starts = StartTimes()
    starts.hear(Observation(now_s=0.0, target=0))
    assert starts.lead_s(None) == 60.0
    assert starts.lead_s(12.0) == 12.0, "the gangs' own report until the first order"
    starts.order(10.0, 2)
    starts.hear(Observation(now_s=50.0, target=2, gangs={"a": GangReport()}))
    assert starts.lead_s(12.0) == 40.0
    starts.hear(Observation(now_s=110.0, target=2, gangs={"a": GangReport(), "b": GangReport()}))
    assert starts.lead_s(12.0) == 70.0
    starts.order(120.0, 1)
    starts.order(130.0, 2)
    starts.hear(Observation(now_s=131.0, target=2, gangs={"a": GangReport(), "b": GangReport()}))
    assert starts.lead_s(12.0) == 70.0, "an order that was taken back tells nothing"


def test_the_start_of_a_first_gang_which_serve_orders_counts_its_node_too() -> None:
    """Serve asks for no decision meanwhile: 240 s for the node, and 28 s of the gang's own, which it reports."""
    starts = StartTimes()
    for now_s in (100.0, 101.0):
        starts.hear(Observation(now_s=now_s, target=0))
    starts.hear(Observation(now_s=369.0, target=1, gangs={"a": GangReport(num_jobs=1)}))
    assert starts.lead_s(28.0) == starts.longest_s(28.0) == 268.0
    starts.hear(Observation(now_s=400.0, target=1))
    starts.hear(Observation(now_s=410.0, target=1, gangs={"b": GangReport()}))
    assert starts.longest_s(28.0) == 268.0, "a dead gang's replacement was not ordered"


def test_a_gang_that_a_restarted_controller_finds_has_not_started_in_a_second() -> None:
    """The controller learns of replicas just after it has asked for a decision."""
    starts = StartTimes()
    starts.hear(Observation(now_s=100.0, target=1))
    starts.hear(Observation(now_s=101.0, target=1, gangs={"a": UNHEARD}))
    assert starts.lead_s(28.0) == starts.longest_s(28.0) == 28.0


def first_gang(num_arrived: float, work_s: float, num_jobs: int = 0) -> dict[str, GangReport]:
    squares_s2 = work_s**2 / num_arrived if num_arrived else 0.0
    return {"a": GangReport(num_jobs=num_jobs, num_arrived=num_arrived, arrived_s=work_s, arrived_s2=squares_s2)}


def test_requests_that_come_while_a_first_gang_starts_are_spread_over_its_start() -> None:
    history = ArrivalHistory()
    for now_s in (98.0, 100.0):
        history.hear(Observation(now_s=now_s, target=0))
    for now_s, num in ((196.0, 0), (198.0, 0), (200.0, 10), (202.0, 11)):
        history.hear(Observation(now_s=now_s, target=1, gangs=first_gang(num, 2.0 * num)))
    assert history.between(100.0, 200.0)[:2] == pytest.approx((10.0, 20.0))
    assert history.between(150.0, 200.0)[1] == pytest.approx(10.0, abs=20 / 16)
    assert history.between(200.0, 202.0)[:2] == (1.0, 2.0), "later ones at their times"


def test_requests_that_come_to_an_idle_first_gang_count_when_they_come() -> None:
    """The request that started the gang was cancelled."""
    history = ArrivalHistory()
    for now_s in range(100):
        history.hear(Observation(now_s=now_s, target=0))
    for now_s in range(160, 300):
        history.hear(Observation(now_s=now_s, target=1, gangs=first_gang(0, 0.0)))
    history.hear(Observation(now_s=300.0, target=1, gangs=first_gang(100, 200.0)))
    assert history.between(299.0, 300.0)[:2] == (100.0, 200.0)


def test_few_requests_after_a_start_from_zero_bring_no_second_gang() -> None:
    """Five requests in 20 s, two of which waited for the gang, keep a third of it busy."""
    scaler = GangScaler(ScalingRules(target_wait_s=3.0, min_gangs=0, max_gangs=3, idle_s=5.0))
    for now_s in range(80):
        assert scaler.decide(Observation(now_s=now_s, target=0)) == 0
    arrived = {86: (0, 0.0), 87: (0, 0.0), 88: (2, 4.1), 92: (3, 5.1), 95: (4, 6.1), 100: (5, 7.1)}
    num, work_s = 0, 0.0
    for now_s in range(86, 104):
        num, work_s = arrived.get(now_s, (num, work_s))
        gangs = first_gang(num, work_s, num_jobs=int(now_s in arrived))
        assert scaler.decide(Observation(now_s=now_s, target=1, gangs=gangs)) == 1, now_s


HEARD = {"a": GangReport(num_arrived=1000, arrived_s=5000.0)}


@pytest.mark.parametrize("unheard", [[{}, {"a": UNHEARD}], [{"a": UNHEARD}], [HEARD, {"a": UNHEARD}]])
def test_jobs_of_the_past_do_not_arrive_again(unheard: list[dict[str, GangReport]]) -> None:
    """A restarted controller has no reports at first, and a gang may miss some: its sums count from its start."""
    scaler, history = GangScaler(replace(RULES, max_gangs=50)), ArrivalHistory()
    for now_s, gangs in enumerate([*unheard, HEARD]):
        seen = Observation(now_s=now_s, target=1, gangs=gangs)
        assert (scaler.decide(seen), history.hear(seen)) == (1, False)
    later = GangReport(num_arrived=1003, arrived_s=5015.0)
    assert history.hear(Observation(now_s=9.0, target=1, gangs={"a": later, "b": UNHEARD}))
    history.hear(Observation(now_s=10.0, target=2, gangs={"a": later, "b": GangReport(num_arrived=2, arrived_s=10.0)}))
    assert history.between(0.0, 10.0)[:2] == (5.0, 25.0), "all of a gang that is new"


def test_a_restarted_controller_ends_no_gang_at_once() -> None:
    scaler = GangScaler(RULES)
    gangs = {name: GangReport(num_arrived=1000, arrived_s=5000.0) for name in "abc"}
    assert scaler.decide(Observation(now_s=0.0, target=3, gangs=gangs)) == 3
    assert scaler.decide(Observation(now_s=scaler.hold_s - 1, target=3, gangs=gangs)) == 3
    assert scaler.decide(Observation(now_s=scaler.hold_s + 1, target=3, gangs=gangs)) == 1


def test_no_rounding_makes_arrivals_fall() -> None:
    """The sums of many gangs have large and small fractions, and for some time no job arrives."""
    history, random = ArrivalHistory(), Random(1)
    sums = [[0.0, 0.0, 0.0] for _ in range(9)]
    for tick in range(400):
        if tick % 20 < 10:
            for each in sums:
                job_s = random.choice((0.6, 1.9, 11.1))
                each[:] = each[0] + 1, each[1] + job_s, each[2] + job_s**2
        gangs = {str(i): GangReport(num_arrived=a, arrived_s=b, arrived_s2=c) for i, (a, b, c) in enumerate(sums)}
        history.hear(Observation(now_s=2.0 * tick, target=9, gangs=gangs))
        assert min(history.between(2.0 * tick - 8.0, 2.0 * tick)) >= 0.0


def test_a_rebuilt_gang_counts_from_zero() -> None:
    trace = fluid()
    trace.run(600, lambda _: 3.0)
    num = trace.target
    for gang in trace.gangs.values():
        gang.num = 0.0
    trace.run(60, lambda _: 3.0)
    assert trace.target >= num


@pytest.mark.parametrize("cv2", [0.0, 1.0])
def test_gangs_needed_is_erlangs_formula(cv2: float) -> None:
    """The results agree with the textbook's sum for C(k, a)."""

    def late(num: int, load: float, wait_s: float) -> float:
        top = load**num / math.factorial(num) * num / (num - load)
        waiting = top / (sum(load**i / math.factorial(i) for i in range(num)) + top)
        return waiting * math.exp(-(num - load) * wait_s / (JOB_S * (1 + cv2) / 2))

    for load in (0.3, 2.0, 7.5):
        for wait_s in (0.0, 4.0):
            least, enough = gangs_needed(load, JOB_S, cv2, wait_s, at_most=99)
            for num, share in ((least, ALERT_SHARE), (enough, LATE_SHARE)):
                assert late(num, load, wait_s) <= share
                assert num - 1 <= load or late(num - 1, load, wait_s) > share
    assert gangs_needed(7.5, JOB_S, cv2, 4.0, at_most=5) == (5, 5)


TICKS = st.lists(st.tuples(st.floats(0, 30), st.sampled_from([math.inf, 5.0, 0.1])), min_size=1, max_size=60)


@settings(max_examples=60, **UNHURRIED)
@given(
    ticks=TICKS,
    min_gangs=st.integers(0, 3),
    more=st.integers(0, 8),
    start_s=st.sampled_from([0.0, 6.0, 60.0]),
    per_node=st.sampled_from([1, 3]),
)
def test_whatever_comes_limits_hold_and_no_gang_with_work_goes(
    ticks: list[tuple[float, float]], min_gangs: int, more: int, start_s: float, per_node: int
) -> None:
    rules = ScalingRules(
        target_wait_s=8.0,
        min_gangs=min_gangs,
        max_gangs=max(1, min_gangs + more),
        idle_s=20.0,
        gangs_per_node=per_node,
    )
    trace = fluid(rules, start_s)
    raised: list[tuple[float, int]] = []
    trace.follow(min_gangs)
    for load, spare_s in ticks:
        for _ in range(5):
            before, target = dict(trace.gangs), trace.target
            trace.tick(load, spare_s)
            assert rules.min_gangs <= trace.target <= rules.max_gangs
            ended = set(before) - set(trace.gangs)
            assert all(before[name].backlog_s == 0 for name in ended)
            if trace.target > target:
                raised.append((trace.now_s, trace.target))
            recent = [num for at_s, num in raised if trace.now_s - at_s < 10.0]
            if trace.target < target and trace.target:
                assert trace.target >= max(recent, default=0), "nothing goes within 10 s of the rise that brought it"


@settings(max_examples=60, **UNHURRIED)
@given(
    demands=st.dictionaries(
        st.sampled_from("abcdef"),
        st.builds(
            RankDemand,
            want=st.integers(0, 30),
            min_gangs=st.integers(0, 2),
            num_ranks=st.sampled_from([1, 2, 4]),
            priority=st.sampled_from([0.5, 1.0, 2.0]),
        ),
        min_size=1,
    ),
    num_ranks=st.integers(0, 64),
)
def test_shares_fit_the_ranks_and_waste_none(demands: dict[str, RankDemand], num_ranks: int) -> None:
    granted = share_ranks(demands, num_ranks)
    used = sum(granted[name] * demand.num_ranks for name, demand in demands.items())
    least = sum(min(demand.want, demand.min_gangs) * demand.num_ranks for demand in demands.values())
    assert used <= max(num_ranks, least)
    for name, demand in demands.items():
        assert min(demand.want, demand.min_gangs) <= granted[name] <= demand.want
        if granted[name] < demand.want:
            assert num_ranks - used < 4, "no room for the widest gang"
            lower = [one for one in demands if demands[one].priority < demand.priority]
            spared = sum((granted[one] - min(demands[one].want, demands[one].min_gangs)) for one in lower)
            assert not spared or demand.num_ranks > 1, "a lower priority has only its minimum"


def test_a_model_of_higher_priority_gets_ranks_that_another_works_on() -> None:
    """The gangs end one after the other, newest first. Serve lets each finish its jobs."""
    scaler = GangScaler(ScalingRules(target_wait_s=10.0, min_gangs=0, max_gangs=4))
    busy = {name: GangReport(backlog_s=50.0, num_jobs=9) for name in "abcd"}
    targets = []
    target = 4
    for now_s in range(0, 60, 2):
        gangs = dict(list(busy.items())[:target])
        target = scaler.decide(Observation(now_s=now_s, target=target, gangs=gangs), granted=1)
        targets.append(target)
    assert sorted(targets, reverse=True) == targets
    assert targets[0] == 3
    assert targets[-1] == 1
    assert targets.index(1) - targets.index(2) >= 5, "one each ten seconds"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_wait_s": 0.0}, "target_wait_s is 0: give a positive number"),
        ({"target_wait_s": 1.0, "min_gangs": 3, "max_gangs": 2}, "min 3 and max 2 gangs"),
        ({"target_wait_s": 1.0, "min_gangs": 0, "max_gangs": 0}, "min 0 and max 0 gangs"),
        ({"target_wait_s": 1.0, "gangs_per_node": 0}, "gangs_per_node is 0: give a whole number, at least 1"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingRules(**fields)  # type: ignore[arg-type]
