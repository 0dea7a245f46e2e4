"""Live load beside the simulation: steps are stretched by what the run's own metrics say, models do not wait for each
other, and what is refused is in time nowhere."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.load.alone import Alone
from benchmarks.load.arrivals import Arrival
from benchmarks.load.client import Outcome
from benchmarks.load.mix import RequestClass, load_mix
from benchmarks.policies.comparison import Case, Simulated, compared, simulated, stretches
from benchmarks.serving.settings import with_values
from deployments.cli.serving import load_config
from engines.gang.gang_config import GangConfig

ALONE = {
    "small": Alone(model="pictures", num_steps=10, step_s=0.1, other_s=0.5, num_ranks=2, ratios={1: 1.25}),
    "clip": Alone(model="clips", num_steps=4, step_s=1.0, other_s=2.0, num_ranks=2),
}
KINDS = {name: RequestClass(name=name, body={"prompt": name}) for name in ALONE}
ARRIVALS = [Arrival(at_s=0.0, kind=KINDS[name], seed=0) for name in ("small", "small", "clip")]
ONE_TEAM, ELASTIC = (GangConfig(num_ranks=2, plans_ahead=1, elastic=elastic) for elastic in (False, True))


def case(policy: str = "arrival", scale: float = 3.0, gang: GangConfig = ONE_TEAM) -> Case:
    return Case(policy=policy, scale=scale, gangs={"pictures": gang, "clips": gang}, alone=ALONE)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._steps = Histogram("troupe_step_seconds", "", ("model", "num_ranks"), registry=self._registry)

    def observe(self, model: str, num_ranks: int, step_s: float, times: int) -> None:
        for _ in range(times):
            self._steps.labels(model, num_ranks).observe(step_s)

    def page(self) -> str:
        return generate_latest(self._registry).decode()


def outcome(name: str, latency_s: float, status: int = 200) -> Outcome:
    return Outcome(name=name, at_s=0.0, late_s=0.0, latency_s=latency_s, status=status)


def test_each_model_is_a_gang_of_its_own() -> None:
    run = simulated(case(), ARRIVALS, {}, refuses=True)
    assert run.latencies_s == pytest.approx([1.5, 2.5, 6.0])
    assert run.rank_s == pytest.approx({"pictures": 4.0, "clips": 8.0})
    stretched = simulated(case(), ARRIVALS, {"pictures": 2.0}, refuses=True)
    assert stretched.latencies_s == pytest.approx([2.5, 4.5, 6.0])


def test_an_elastic_gang_gives_each_picture_a_rank() -> None:
    """The first begins on both, and makes room for the second one."""
    run = simulated(case("shortest", gang=ELASTIC), ARRIVALS[:2], {}, refuses=True)
    assert 1.6 < min(known(run)) < max(known(run)) < 2.0, "1.75 on a rank each, and 1.5 and 2.5 one after the other"
    assert 2.5 < run.rank_s["pictures"] < 3.0, "4 on both ranks"


@pytest.mark.parametrize("policy", ["shortest", "deadline", "fair", "arrival"])
def test_tiers_go_before_each_other_as_in_the_gang(policy: str) -> None:
    """Of nine that come at once, the last ones most urgent. A tier says nothing to ``arrival``, nor beside deadlines,
    which are the same for all of them here."""
    mix = load_mix("tiers")
    kinds = [mix.named(name) for name in ("flex", "default", "priority") for _ in range(3)]
    alone = {one.name: ALONE["small"] for one in mix.classes}
    tiers = Case(policy=policy, scale=1000.0, gangs={"pictures": ONE_TEAM}, alone=alone)
    run = simulated(tiers, [Arrival(at_s=0.0, kind=kind, seed=0) for kind in kinds], {}, refuses=True)
    flex, default, priority = (fmean(known(run)[3 * number : 3 * number + 3]) for number in range(3))
    assert (flex < default < priority) if policy in ("arrival", "deadline") else (priority < default < flex)


def known(run: Simulated) -> list[float]:
    return [latency_s for latency_s in run.latencies_s if latency_s is not None]


def test_steps_are_as_long_as_they_were_in_the_run() -> None:
    metrics = Metrics()
    metrics.observe("pictures", 2, 9.0, 1)
    before = metrics.page()
    metrics.observe("pictures", 2, 0.15, 20)
    metrics.observe("clips", 2, 3.0, 4)
    assert stretches(case(), ARRIVALS, before, metrics.page()) == pytest.approx({"pictures": 1.5, "clips": 3.0})


def test_ranks_of_an_elastic_gang_are_compared_by_their_time() -> None:
    elastic, metrics = case("shortest", gang=ELASTIC), Metrics()
    metrics.observe("pictures", 1, 0.25, 20)
    expected_s = simulated(elastic, ARRIVALS[:2], {}, refuses=False).rank_s["pictures"]
    found = stretches(elastic, ARRIVALS[:2], "", metrics.page())
    assert found == pytest.approx({"pictures": 5.0 / expected_s})
    assert stretches(elastic, ARRIVALS, "", metrics.page()).keys() == {"pictures"}, "the other's metrics say nothing"


def test_requests_say_deadlines_under_the_policy_that_goes_by_them() -> None:
    assert case("shortest").with_deadlines(ARRIVALS) == tuple(ARRIVALS)
    due = case("deadline", scale=2.0).with_deadlines(ARRIVALS)
    assert [one.kind.body["deadline_s"] for one in due] == pytest.approx([3.0, 3.0, 12.0])
    assert all(one.kind.body["prompt"] == one.kind.name for one in due)


def test_who_would_be_late_is_refused_as_the_gang_does() -> None:
    tight = case("deadline", scale=1.2)
    first, second, clip = simulated(tight, ARRIVALS, {}, refuses=True).latencies_s
    assert second is None
    assert (first, clip) == pytest.approx((1.5, 6.0))
    assert None not in simulated(tight, ARRIVALS, {}, refuses=False).latencies_s


def test_a_policy_is_told_live_and_simulated() -> None:
    metrics = Metrics()
    metrics.observe("pictures", 2, 0.2, 10)
    metrics.observe("clips", 2, 2.0, 4)
    predicted = replace(outcome("small", 3.0), eta_s=1.5, stages_ms={"total": 2000.0})
    outcomes = [predicted, outcome("small", 0.1, status=429), outcome("clip", 25.0)]
    row = compared(case(scale=4.0), ARRIVALS, outcomes, Metrics().page(), metrics.page())
    assert (row["policy"], row["elastic"], row["statuses"]) == ("arrival", False, {"200": 2, "429": 1})
    assert row["stretch"] == {"pictures": 2.0, "clips": 2.0}, "the one that was refused took no steps"
    assert row["live"]["answered"] == 2
    assert row["live"]["attainment"] == round(1 / 3, 4), "3 s of 6, a refusal, and 25 s of 24"
    assert row["live"]["latency_s"] == {"mean": 14.0, "p50": 25.0, "p95": 25.0, "p99": 25.0}
    assert row["as_alone"]["latency_s"]["mean"] == round((1.5 + 2.5 + 6.0) / 3, 4)
    assert row["as_in_run"]["attainment"] == 1.0
    assert row["live_by_simulated"] == {"as_alone": round(28.0 / 7.5, 3), "as_in_run": round(28.0 / 12.5, 3)}
    assert row["eta"] == {
        "all": {"told": 1, "median_error": 0.25, "p95_error": 0.25},
        "small": {"told": 1, "median_error": 0.25, "p95_error": 0.25},
        "clip": {"told": 0},
    }
    assert row["use"]["live"] == {"rank_s_per_request": 10.0, "share_in_steps": 0.2}
    assert row["use"]["as_alone"] == {"rank_s_per_request": 4.0, "share_in_steps": 0.5}
    assert row["classes"]["small"]["requests"] == 2
    assert row["classes"]["small"]["live"]["attainment"] == 0.5
    assert row["classes"]["clip"]["live_by_simulated"] == {"as_alone": round(25 / 6, 3), "as_in_run": 2.5}


def test_nothing_that_was_answered_is_a_row_too() -> None:
    outcomes = [outcome(one.kind.name, 0.1, status=503) for one in ARRIVALS]
    row = compared(case(), ARRIVALS, outcomes, "", "")
    assert row["stretch"] == {}
    assert row["live"] == {"answered": 0, "attainment": 0.0, "latency_s": {}}
    assert row["live_by_simulated"] == {"as_alone": None, "as_in_run": None}


def test_what_cannot_be_simulated_is_said() -> None:
    config = load_config("laptop")
    with pytest.raises(ValueError, match="class small was measured of pictures; served: flux-shapes"):
        Case.of(config, "arrival", 3.0, ALONE)
    with pytest.raises(ValueError, match="flux-shapes has up to 2 gangs; one is simulated"):
        Case.of(with_values(config, ["denoiser.num_replicas=2"]), "arrival", 3.0, {})
    blind = {"small": ALONE["small"].model_copy(update={"model": "flux-shapes", "num_ranks": 0})}
    with pytest.raises(ValueError, match=r"class small was measured without metrics, .* leave it out of --alone"):
        Case.of(config, "arrival", 3.0, blind)
    assert Case.of(config, "arrival", 3.0, {}).num_ranks == 5
