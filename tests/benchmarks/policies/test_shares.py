"""Owners' shares of a simulated gang, and their waits beyond the lone time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load.mix import Owner
from benchmarks.policies.__main__ import by_owner, line, poisson, with_owners
from benchmarks.policies.h200 import NUM_STEPS, SHARES, STEPS
from benchmarks.policies.simulation import Arrival, SimulatedGang, Simulation, Span
from engines.gang.policies.policy import make_policy

MUCH, LITTLE = Owner(name="much", share=80, weight=1), Owner(name="little", share=20, weight=3)
LONE_S = {shape: NUM_STEPS * by_size[2] for shape, by_size in STEPS.items()}


def simulation_of(policy: str) -> Simulation:
    return Simulation(gang=SimulatedGang(steps=STEPS, num_ranks=2), policy=make_policy(policy))


def test_work_after_the_first_owners_last_step_does_not_count() -> None:
    simulation = simulation_of("fair")
    arrivals = [Arrival(at_s=0.0, shape="512x512", num_steps=1)] * 3
    simulation.steps = {
        0: [Span(0.0, 1.0, 50.0), Span(1.0, 4.0, 8.0)],
        1: [Span(4.0, 5.0, 2.0)],
        2: [Span(5.0, 6.0, 100.0)],
    }
    simulation.latencies_s = {0: 4.0, 1: 5.0, 2: 6.0}
    found = by_owner(simulation, arrivals, [MUCH, LITTLE, MUCH], {"512x512": 1.0})
    assert found == {
        "little": {"requests": 1, "mean_wait_s": 4.0, "weight_share": 0.75, "share": 0.2},
        "much": {"requests": 2, "mean_wait_s": 4.0, "weight_share": 0.25, "share": 0.8},
    }
    assert by_owner(simulation, arrivals, [None] * 3, {}) == {}
    row = {"policy": "fair", "elastic": False, "attainment": 1, "mean_s": 1, "p95_s": 1, "mean_s_by_shape": {}}
    assert line({**row, "owners": found}).endswith("much waits 4.00 s, has 80% of 25%")


@pytest.fixture(scope="module")
def under_overload() -> dict[str, dict[str, Any]]:
    """Return the owners' results by policy, with three times the gang's capacity in requests."""
    load, found = poisson(60, 3.0, LONE_S, seed=3), {}
    owners = [LITTLE if number % 2 else MUCH for number in range(len(load))]
    arrivals = with_owners(load, owners)
    for policy in ("fair", "arrival"):
        simulation = simulation_of(policy)
        simulation.run(arrivals)
        found[policy] = by_owner(simulation, arrivals, owners, LONE_S)
    return found


def test_fair_shares_are_as_weights_say_and_others_are_not(under_overload: dict[str, dict[str, Any]]) -> None:
    assert SHARES, "sizes differ by an order of magnitude"
    assert under_overload["fair"]["little"]["share"] == pytest.approx(0.75, abs=0.08)
    assert under_overload["arrival"]["little"]["share"] == pytest.approx(0.5, abs=0.15)
