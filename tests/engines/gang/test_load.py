"""Requests go to the gang that would finish them first."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.load import GangLoad, LoadBoard, NewWork, OpenWork, rank_gangs
from tests.support.unhurried import UNHURRIED

SMALL, LARGE = "small", "large"
STEP_S = {SMALL: 0.1, LARGE: 2.0}


def load(
    *left_s: float, by_urgency: bool = True, cold_s: float = 0.0, kinds: str = "small large", wake_s: float = 0.0
) -> GangLoad:
    jobs = {f"job{i}": OpenWork(one, one) for i, one in enumerate(left_s)}
    step_s = {kind: STEP_S[kind] for kind in kinds.split()}
    return GangLoad(jobs=jobs, step_s=step_s, by_urgency=by_urgency, cold_s=cold_s, wake_s=wake_s)


def order(loads: dict[str, GangLoad], new: NewWork) -> list[str]:
    return [choice.name for choice in rank_gangs(loads, new)]


def test_the_gang_with_less_work_is_first_whatever_the_number_of_jobs() -> None:
    loads = {"one large": load(20.0), "three small": load(1.0, 1.0, 1.0)}
    assert order(loads, NewWork(LARGE, 10)) == ["three small", "one large"]


def test_a_short_request_overtakes_a_long_one_where_the_policy_lets_it() -> None:
    loads = {"long": load(50.0), "short": load(0.5, 0.5)}
    assert [round(one.finish_s, 2) for one in rank_gangs(loads, NewWork(SMALL, 10))] == [1.0, 2.0]
    in_turn = {"long": load(50.0, by_urgency=False), "short": load(0.5, 0.5, by_urgency=False)}
    assert order(in_turn, NewWork(SMALL, 10)) == ["short", "long"]


def test_a_request_of_low_priority_overtakes_less() -> None:
    loads = {"a": load(2.0), "b": load(1.5)}
    assert [one.finish_s for one in rank_gangs(loads, NewWork(SMALL, 10))] == [1.0, 1.0]
    assert [one.finish_s for one in rank_gangs(loads, NewWork(SMALL, 10, priority=0.25))] == [2.5, 3.0]
    waiting = {"a": GangLoad(jobs={"x": OpenWork(2.0, 8.0)}, step_s=STEP_S)}
    assert rank_gangs(waiting, NewWork(LARGE, 2))[0].finish_s == 4.0


ONE_PASS: dict[str, Any] = {"last_kind": st.just(""), "num_last": st.just(0)}
"""Hypothesis fills in all fields of a tuple."""


def test_the_steps_of_two_passes_take_what_each_takes() -> None:
    """A gang that has run one of both kinds cannot predict the whole."""
    two = NewWork(SMALL, 13, last_kind=LARGE, num_last=3)
    (both,) = rank_gangs({"a": load()}, two)
    assert both.own_s == pytest.approx(10 * STEP_S[SMALL] + 3 * STEP_S[LARGE])
    assert rank_gangs({"a": load(kinds=SMALL)}, two) == []
    half, whole = load(kinds=SMALL, cold_s=7.0), load(5.0)
    assert [one.own_s for one in rank_gangs({"half": half, "whole": whole}, two)] == pytest.approx(
        [both.own_s, both.own_s + 7.0]
    )


@settings(max_examples=50, **UNHURRIED)
@given(st.floats(0.01, 3.0), st.integers(1, 100), st.floats(0.92, 1.08), st.sampled_from([0.25, 1.0, 4.0]))
def test_a_request_waits_for_earlier_ones_of_its_own_kind(
    step_s: float, num_steps: int, drift: float, priority: float
) -> None:
    """Reports are rounded, and the prediction of open jobs may be newer than that of the kind."""
    left_s = drift * num_steps * step_s
    jobs = {str(number): OpenWork(left_s, left_s / priority) for number in range(3)}
    reported = GangLoad.of_stats(GangLoad(jobs=jobs, step_s={LARGE: step_s}).to_stats())
    (choice,) = rank_gangs({"a": reported}, NewWork(LARGE, num_steps, priority=priority))
    assert choice.finish_s > 3.5 * num_steps * step_s - 0.02


def test_a_warm_gang_is_first_until_its_wait_is_longer_than_a_cold_start() -> None:
    cold = load(cold_s=5.0, kinds=SMALL)
    assert order({"cold": cold, "warm": load(4.0)}, NewWork(LARGE, 10)) == ["warm", "cold"]
    assert order({"cold": cold, "warm": load(6.0)}, NewWork(LARGE, 10)) == ["cold", "warm"]


def test_a_gang_with_the_adapters_is_first_until_its_wait_is_longer_than_a_change() -> None:
    new = NewWork(LARGE, 10, adapters="ink")
    plain, ink = (GangLoad(step_s=STEP_S, adapters=adapters, switch_s=0.5) for adapters in ("", "ink"))
    assert [one.finish_s for one in rank_gangs({"plain": plain, "ink": ink}, new)] == [20.0, 20.5]
    assert order({"ink": ink, "plain": plain}, NewWork(LARGE, 10)) == ["plain", "ink"]
    jobs = {"x": OpenWork(1.0, 1.0)}
    assert order({"ink": replace(ink, jobs=jobs), "plain": plain}, new) == ["plain", "ink"]
    assert GangLoad.of_stats({**ink.to_stats(), "adapters": "ink"}) == ink
    old = {name: value for name, value in plain.to_stats().items() if name not in ("adapters", "switch_s")}
    assert GangLoad.of_stats(old) == replace(plain, switch_s=0.0), "a replica of an earlier version"


def test_a_gang_that_sleeps_is_first_once_the_others_are_busy_for_longer() -> None:
    asleep = GangLoad(step_s=STEP_S, wake_s=4.0)
    assert order({"asleep": asleep, "awake": load(3.0)}, NewWork(LARGE, 10)) == ["awake", "asleep"]
    assert order({"asleep": asleep, "awake": load(5.0)}, NewWork(LARGE, 10)) == ["asleep", "awake"]
    (later,) = rank_gangs({"asleep": asleep}, NewWork(LARGE, 10), {"asleep": 1.0})
    assert later.finish_s == 23.0, "its sleep has become shorter"


def test_nothing_known_of_a_kind_gives_no_order() -> None:
    assert rank_gangs({"a": load(kinds=SMALL), "b": load(kinds=SMALL)}, NewWork(LARGE, 10)) == []
    assert rank_gangs({}, NewWork(LARGE, 10)) == []


def test_what_was_sent_since_a_report_counts_and_what_was_worked_off_does_not() -> None:
    loads = {"a": load(3.0), "b": load(4.0)}
    new = NewWork(LARGE, 10)
    sent = {"a": [OpenWork(2.0, 2.0)]}
    assert rank_gangs(loads, new, sent=sent)[0].name == "b"
    assert rank_gangs(loads, new, {"a": 2.5, "b": 0.0}, sent)[0].name == "a"
    assert rank_gangs(loads, new, dict.fromkeys(loads, 100.0))[0].finish_s == 20.0, "no gang is done before it begins"


def test_of_idle_gangs_the_oldest_is_first_so_that_the_newest_may_end() -> None:
    for names in permutations("abc"):
        assert order({name: load() for name in names}, NewWork(SMALL, 5)) == list(names)


@settings(max_examples=50, **UNHURRIED)
@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(
            load,
            st.floats(0, 50),
            st.floats(0, 50),
            by_urgency=st.booleans(),
            cold_s=st.floats(0, 9),
            wake_s=st.floats(0, 9),
        ),
        min_size=1,
    ),
    st.builds(
        NewWork,
        st.sampled_from([SMALL, LARGE]),
        st.integers(1, 50),
        st.sampled_from([0.25, 1.0, 4.0]),
        st.just(""),
        **ONE_PASS,
    ),
)
def test_the_order_is_by_finish_and_a_report_survives_json(loads: dict[str, GangLoad], new: NewWork) -> None:
    ranked = rank_gangs(loads, new)
    assert sorted(one.name for one in ranked) == sorted(loads)
    finishes = [round(one.finish_s, 2) for one in ranked]
    assert finishes == sorted(finishes)
    for one in loads.values():
        sent = GangLoad.of_stats(json.loads(json.dumps(one.to_stats())))
        assert abs(sent.backlog_s - one.backlog_s) <= 0.011
        assert sent.to_stats() == one.to_stats()


def test_a_sent_job_counts_until_a_report_has_it() -> None:
    board, new = LoadBoard(), NewWork(LARGE, 10)
    stats = {"a": load().to_stats(), "b": load().to_stats()}
    board.hear(stats, 0.0)
    assert board.choose("ab", "1", new, 0.0)[0] == "a"
    assert board.choose("ab", "2", new, 0.1)[0] == "b"
    jobs = {"1": OpenWork(19.0, 19.0)}
    board.hear(stats | {"a": GangLoad(jobs=jobs, step_s=STEP_S).to_stats()}, 0.5)
    assert board.choose("ab", "3", new, 0.5)[0] == "a", "19 s, counted once, before the 20 s of the other"
    board.hear(stats, 10.0)
    assert board.choose("ab", "4", new, 10.0)[0] == "a", "the other has been at work for ten seconds"
    board.hear(stats, 60.0)
    assert board.choose("ba", "5", new, 60.0)[0] == "b", "the same report is a new one if all should be done"


def test_requests_at_once_are_divided_among_gangs_that_were_idle_for_long() -> None:
    """An idle gang repeats its report, which is no news: its newest report is an old one."""
    board, new = LoadBoard(), NewWork(LARGE, 10)
    slower = GangLoad(step_s={LARGE: 1.02 * STEP_S[LARGE]})
    board.hear({"a": load().to_stats(), "b": slower.to_stats()}, 0.0)
    chosen = [board.choose("ab", str(number), new, 100.0)[0] for number in range(6)]
    assert chosen == ["a", "b"] * 3


def test_a_gang_without_a_report_leaves_the_choice_to_others() -> None:
    board = LoadBoard()
    board.hear({"a": load().to_stats(), "b": {}}, 0.0)
    assert board.choose("ab", "1", NewWork(LARGE, 10), 0.0) == []
    board.hear({"a": load().to_stats(), "b": load().to_stats()}, 1.0)
    assert board.choose("ab", "1", NewWork(LARGE, 10), 1.0)[0] == "a"
    board.hear({"b": load().to_stats()}, 2.0)
    assert board.choose("b", "2", NewWork(LARGE, 10), 2.0) == ["b"]
    assert board.choose("ab", "3", NewWork(LARGE, 10), 2.0) == []


def test_a_job_that_another_gang_took_counts_there() -> None:
    board, new = LoadBoard(), NewWork(LARGE, 10)
    board.hear({name: load().to_stats() for name in "ab"}, 0.0)
    assert board.choose("ab", "1", new, 0.0)[0] == "a"
    board.confirm("b", "1")
    assert board.choose("ab", "2", new, 0.0)[0] == "a"


class CountedJobs(dict[str, OpenWork]):
    """Jobs of a gang that count how often they are iterated."""

    num_reads = 0

    def values(self) -> Any:
        self.num_reads += 1
        return super().values()


def test_gangs_that_end_without_a_report_are_forgotten() -> None:
    board, stats, sizes = LoadBoard(), load().to_stats(), []
    for number in range(100, 140):
        board.hear({"a": stats, f"new-{number}": {}}, 10.0 * number)
        assert board.choose(["a"], f"job-{number}", NewWork(SMALL, 4), 10.0 * number) == ["a"]
        board.confirm(f"new-{number}", f"job-{number}")
        board.hear({"a": stats}, 10.0 * number + 1)
        sizes.append(len(pickle.dumps(board)))
    assert sizes[-1] == sizes[0]


def test_the_jobs_of_a_report_are_added_up_once_for_all_requests() -> None:
    jobs = CountedJobs({str(number): OpenWork(1.0, 1.0 + number) for number in range(50)})
    loads = {"a": GangLoad(jobs=jobs, step_s=STEP_S), "b": load()}
    num_before = jobs.num_reads
    finishes_s = [rank_gangs(loads, NewWork(LARGE, num_steps))[-1].finish_s for num_steps in range(1, 20)]
    num_before_s = [sum(1.0 + number <= 2.2 * num_steps for number in range(50)) for num_steps in range(1, 20)]
    assert finishes_s == [num + 2.0 * num_steps for num_steps, num in enumerate(num_before_s, 1)]
    assert jobs.num_reads == num_before


class PlainBoard:
    """The rule of ``LoadBoard`` job by job: reports by name, and the jobs sent since."""

    def __init__(self) -> None:
        self.reports: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self.sent: dict[str, dict[str, tuple[float, float, float]]] = {}

    def hear(self, stats: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        for name in set(self.reports) - {name for name, one in stats.items() if one}:
            del self.reports[name]
            self.sent.pop(name, None)
        for name, one in stats.items():
            if one and (name not in self.reports or one != self.reports[name][1]):
                self.reports[name] = now_s, one
                kept = {job: sent for job, sent in self.sent.get(name, {}).items() if now_s - sent[0] < 1.0}
                self.sent[name] = kept

    def choose(self, names: Sequence[str], job_id: str, new: NewWork, now_s: float) -> list[str]:
        if any(name not in self.reports for name in names):
            return []
        known = [self.reports[name][1]["step_s"] for name in names if new.kind in self.reports[name][1]["step_s"]]
        ordered = (
            sorted(self.key(name, place, new, known[0][new.kind], now_s) for place, name in enumerate(names))
            if known
            else []
        )
        if ordered:
            own_s = ordered[0][-1]
            self.sent.setdefault(ordered[0][3], {})[job_id] = now_s, own_s, own_s / new.priority
        return [name for _, _, _, name, _ in ordered]

    def key(
        self, name: str, place: int, new: NewWork, usual_s: float, now_s: float
    ) -> tuple[float, float, int, str, float]:
        heard_s, stats = self.reports[name]
        own_s = new.num_steps * stats["step_s"].get(new.kind, usual_s)
        if new.kind not in stats["step_s"]:
            own_s += stats["cold_s"]
        elif new.adapters != stats["adapters"]:
            own_s += stats["switch_s"]
        open_sent = {job: one for job, one in self.sent.get(name, {}).items() if now_s - one[0] <= 1.0 + one[1]}
        beside = [(left_s, urgency_s) for job, (_, left_s, urgency_s) in open_sent.items() if job not in stats["jobs"]]
        first = [
            sum(
                left_s
                for left_s, urgency_s in jobs
                if not stats["by_urgency"] or urgency_s <= 1.1 * own_s / new.priority + 0.01
            )
            for jobs in (stats["jobs"].values(), beside)
        ]
        finish_s = max(0.0, stats["wake_s"] + first[0] - (now_s - heard_s)) + first[1] + own_s
        backlog_s = sum(left_s for left_s, _ in stats["jobs"].values()) + sum(left_s for left_s, _ in beside)
        return round(finish_s, 2), round(backlog_s, 2), place, name, own_s


EXACT_S = st.sampled_from([0.5, 1.0, 2.0, 8.0, 32.0])
"""Seconds whose sums are exact in any order, and often equal."""
REPORTS = st.builds(
    lambda jobs, kinds, by_urgency, cold_s, wake_s, adapters, switch_s: {
        "jobs": {job_id: [left_s, left_s * slower] for job_id, (left_s, slower) in jobs.items()},
        "step_s": {kind: {SMALL: 0.125, LARGE: 2.0}[kind] for kind in kinds},
        "by_urgency": by_urgency,
        "cold_s": cold_s,
        "wake_s": wake_s,
        "adapters": adapters,
        "switch_s": switch_s,
    },
    st.dictionaries(st.integers(0, 30).map(str), st.tuples(EXACT_S, st.sampled_from([0.25, 1.0, 4.0])), max_size=6),
    st.sampled_from([[SMALL], [SMALL, LARGE]]),
    st.booleans(),
    EXACT_S,
    st.sampled_from([0.0, 1.5]),
    st.sampled_from(["", "ink"]),
    st.sampled_from([0.0, 0.5]),
)
EVENTS = st.one_of(
    st.tuples(st.just("hear"), st.dictionaries(st.sampled_from("abc"), REPORTS, min_size=1)),
    st.tuples(
        st.just("choose"),
        st.builds(
            NewWork,
            st.sampled_from([SMALL, LARGE]),
            st.sampled_from([4, 16]),
            st.sampled_from([0.25, 1.0, 4.0]),
            st.sampled_from(["", "ink"]),
            **ONE_PASS,
        ),
    ),
)


@settings(max_examples=200, **UNHURRIED)
@given(
    st.lists(REPORTS, min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from([0.0, 0.125, 1.0, 4.0]), EVENTS), min_size=1, max_size=12),
)
def test_choices_are_those_of_the_rule_job_by_job(
    reports: list[dict[str, Any]], events: list[tuple[float, tuple[str, Any]]]
) -> None:
    board, plain, now_s = LoadBoard(), PlainBoard(), 0.0
    stats = dict(zip("abc", reports, strict=True))
    for number, (later_s, (event, value)) in enumerate([(0.0, ("hear", stats)), *events]):
        now_s += later_s
        if event == "hear":
            stats = stats | value
            board.hear(stats, now_s)
            plain.hear(stats, now_s)
        else:
            chosen = [one.choose("abc", str(number), value, now_s) for one in (board, plain)]
            assert chosen[0] == chosen[1]
