"""Live load beside the simulation: steps are stretched by what the run's own metrics say, and models do not wait for
each other."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.load.arrivals import Arrival
from benchmarks.load.client import Outcome
from benchmarks.load.mix import RequestClass
from benchmarks.policies.live import Alone, GangLimits, row_of, simulated, steps_of, stretches

ALONE = {
    "small": Alone(model="pictures", num_steps=10, step_s=0.1, other_s=0.5),
    "clip": Alone(model="clips", num_steps=4, step_s=1.0, other_s=2.0),
}
KINDS = {name: RequestClass(name=name, body={}) for name in ALONE}
ARRIVALS = [Arrival(at_s=0.0, kind=KINDS[name], seed=0) for name in ("small", "small", "clip")]
SHAPE = GangLimits(num_ranks=2, max_running_jobs=4, plans_ahead=1)


def test_steps_are_as_long_as_they_were_in_the_run() -> None:
    registry = CollectorRegistry()
    steps = Histogram("troupe_step_seconds", "", ("model", "num_ranks"), registry=registry)
    before = steps_of(generate_latest(registry).decode())
    for _ in range(20):
        steps.labels("pictures", 2).observe(0.15)
    for _ in range(4):
        steps.labels("clips", 2).observe(3.0)
    after = steps_of(generate_latest(registry).decode())
    assert after["clips"] == (12.0, 4.0)
    assert stretches(before, after, ALONE, ARRIVALS) == pytest.approx({"pictures": 1.5, "clips": 3.0})


def test_each_model_is_a_gang_of_its_own() -> None:
    gangs = {"pictures": SHAPE, "clips": SHAPE}
    as_alone = simulated("arrival", gangs, ALONE, ARRIVALS, {"pictures": 1.0, "clips": 1.0})
    assert as_alone == pytest.approx([1.5, 2.5, 6.0])
    as_in_run = simulated("arrival", gangs, ALONE, ARRIVALS, {"pictures": 2.0, "clips": 1.0})
    assert as_in_run == pytest.approx([2.5, 4.5, 6.0])
    outcomes = [Outcome(name="small", at_s=0.0, late_s=0.0, latency_s=s, status=200) for s in (2.5, 5.5)]
    assert row_of([0, 1], outcomes, as_alone, as_in_run) == {
        "requests": 2,
        "live_s": 4.0,
        "simulated_as_alone_s": 2.0,
        "simulated_as_in_run_s": 3.5,
        "live_by_simulated": 1.143,
    }
