"""When a rank may be sent its next step: before the last one ends, and no sooner than hides what a call takes."""

from __future__ import annotations

import pytest

from engines.gang.eta.lead import LEAD_S, LEAD_SHARE
from engines.gang.jobs.step_plan import JobStep, Work
from engines.gang.ranks.traffic import Flight, Traffic

LONG_S, SHORT_S = 4.0, 0.02
LEAD_OF_LONG_S = LEAD_SHARE * LONG_S


def flight(predicted_s: float, ranks: tuple[int, ...] = (0, 1), *, works: bool = True) -> Flight:
    work = Work(job_steps=(JobStep(job_id="a", step=1),), ranks=ranks)
    return Flight(works=(work,) if works else (), reports=dict.fromkeys(ranks), latents={}, predicted_s=predicted_s)


def sent(traffic: Traffic, *flights: Flight) -> Flight:
    for one in flights:
        traffic.begin(one)
    return flights[-1]


@pytest.mark.parametrize("reports_early", [False, True])
@pytest.mark.parametrize("predicted_s", [0.0, SHORT_S])
def test_short_steps_and_those_that_nobody_knows_go_out_at_once(reports_early: bool, predicted_s: float) -> None:
    traffic = Traffic(2, reports_early=reports_early)
    assert traffic.free_ranks(2, 10.0) == {0, 1}
    sent(traffic, flight(predicted_s))
    assert traffic.free_ranks(2, 10.0) == {0, 1}
    sent(traffic, flight(predicted_s))
    assert traffic.free_ranks(2, 10.0) == set(), "as many as may be"
    assert traffic.next_free_in_s(2, 10.0) is None, "a report must come first"


def test_a_long_step_is_followed_shortly_before_its_end() -> None:
    traffic = Traffic(3)
    long = sent(traffic, flight(LONG_S))
    assert traffic.free_ranks(2, 10.0) == {2}, "it may not even have begun"
    traffic.start(long, 10.0)
    assert traffic.next_free_in_s(2, 11.0) == pytest.approx(LONG_S - LEAD_OF_LONG_S - 1)
    assert traffic.free_ranks(2, 10 + LONG_S - 1.01 * LEAD_OF_LONG_S) == {2}
    assert traffic.free_ranks(2, 10 + LONG_S - 0.99 * LEAD_OF_LONG_S) == {0, 1, 2}
    assert traffic.free_ranks(2, 10 + 2 * LONG_S) == {0, 1, 2}, "it takes longer than predicted"
    assert traffic.next_free_in_s(2, 10 + 2 * LONG_S) is None


def test_a_rank_with_a_gpu_works_on_after_its_report() -> None:
    traffic = Traffic(2, reports_early=True)
    long = sent(traffic, flight(LONG_S))
    traffic.start(long, 10.0)
    traffic.end(long, 10.5)
    assert traffic.is_idle, "there is no report to come"
    assert traffic.free_ranks(2, 10.5) == set()
    assert traffic.next_free_in_s(2, 10.5) == pytest.approx(LONG_S - LEAD_OF_LONG_S)
    assert traffic.free_ranks(2, 10.5 + LONG_S - 0.99 * LEAD_OF_LONG_S) == {0, 1}
    sent(traffic, flight(LONG_S))
    assert traffic.free_ranks(2, 10.5 + LONG_S - 0.99 * LEAD_OF_LONG_S) == set(), "another one, all of it"


@pytest.mark.parametrize("predicted_s", [0.0, LONG_S])
def test_ranks_are_busy_until_the_last_has_done_what_it_was_sent(predicted_s: float) -> None:
    """Where nothing was measured, what is asked says what steps take."""
    traffic = Traffic(3)

    def busy_s(now_s: float) -> float:
        return traffic.busy_s(now_s, lambda _: LONG_S)

    assert busy_s(10.0) == 0.0
    first = sent(traffic, flight(predicted_s))
    assert busy_s(10.0) == LONG_S, "it may not even have begun"
    traffic.start(first, 10.0)
    sent(traffic, flight(predicted_s, ranks=(1,)), flight(0.25 * LONG_S, ranks=(2,)))
    assert busy_s(11.0) == 2 * LONG_S - 1, "rank 1 does both"
    traffic.end(first, 11.5)
    assert busy_s(12.0) == LONG_S


def test_a_rank_with_a_gpu_is_busy_after_its_report() -> None:
    traffic = Traffic(2, reports_early=True)
    traffic.end(sent(traffic, flight(LONG_S)), 10.0)
    assert traffic.busy_s(11.0, lambda _: LONG_S) == LONG_S - 1
    sent(traffic, flight(SHORT_S))
    assert traffic.busy_s(11.0, lambda _: LONG_S) == LONG_S - 1 + SHORT_S
    assert traffic.busy_s(20.0, lambda _: LONG_S) == SHORT_S


def test_what_ranks_do_beside_the_teams_of_a_plan_takes_them_no_time() -> None:
    traffic = Traffic(2, reports_early=True)
    traffic.end(sent(traffic, flight(LONG_S)), 10.0)
    traffic.end(sent(traffic, flight(0.0, works=False)), 10.0)
    assert traffic.free_ranks(2, 10.0) == set(), "the step is still under way"


def test_reports_that_came_in_time_leave_a_rank_free() -> None:
    traffic = Traffic(2)
    long = sent(traffic, flight(LONG_S))
    traffic.start(long, 10.0)
    traffic.end(long, 10.0 + LONG_S / 2)
    assert traffic.free_ranks(2, 10.0 + LONG_S / 2) == {0, 1}
    assert LEAD_S < LONG_S
