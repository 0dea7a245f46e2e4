"""Shares are of the time in which all owners have work, and waits are beyond what requests take alone."""

from __future__ import annotations

import pytest

from benchmarks.load.owner import Owner
from benchmarks.policies.__main__ import poisson, served, with_owners
from benchmarks.policies.h200 import NUM_STEPS, SHARES, STEPS
from benchmarks.policies.shares import Served, shares, told
from benchmarks.policies.simulation import SimulatedGang, Simulation, Span
from engines.gang.policies.policy import make_policy

MUCH, LITTLE = Owner(name="much", share=80, weight=1), Owner(name="little", share=20, weight=3)


def request(owner: Owner, at_s: float, *steps: tuple[float, float, float], end_s: float, lone_s: float = 1.0) -> Served:
    return Served(owner=owner, at_s=at_s, end_s=end_s, lone_s=lone_s, steps=[Span(*step) for step in steps])


def test_what_one_has_while_another_has_nothing_does_not_count() -> None:
    requests = [
        request(MUCH, 0.0, (0.0, 4.0, 8.0), end_s=4.5),
        request(MUCH, 3.0, (4.0, 5.0, 2.0), (6.0, 10.0, 8.0), end_s=10.0),
        request(LITTLE, 2.0, (5.0, 6.0, 2.0), end_s=7.0, lone_s=2.0),
        request(LITTLE, 9.0, (10.0, 11.0, 2.0), end_s=11.0),
    ]
    found = shares(requests)
    assert found["all_have_work_s"] == 5.0, "from 2 to 6, where the steps of the first end, and from 9 to 10"
    assert found["owners"]["much"]["share"] == round((4 + 2 + 2) / 10, 4)
    assert found["owners"]["little"] == {"requests": 2, "mean_wait_s": 2.0, "weight_share": 0.75, "share": 0.2}
    assert told({"m": found}).startswith("little of m waits 2.00 s, has 20 of 75 %; much of m waits")


def test_owners_who_never_meet_have_no_shares() -> None:
    found = shares([request(MUCH, 0.0, (0.0, 1.0, 1.0), end_s=1.0), request(LITTLE, 1.0, (1.0, 2.0, 1.0), end_s=2.0)])
    assert found["all_have_work_s"] == 0.0
    assert [one["share"] for one in found["owners"].values()] == [None, None]
    assert "nothing beside all others" in told({"m": found})
    assert shares([]) == {"all_have_work_s": 0, "owners": {}}


@pytest.fixture(scope="module")
def under_overload() -> dict[str, dict[str, float]]:
    """Shares by policy and owner, where three times as much is asked for as there is."""
    lone_s = {shape: NUM_STEPS * by_size[2] for shape, by_size in STEPS.items()}
    load, found = poisson(120, 3.0, lone_s, seed=3), {}
    owners = [LITTLE if number % 2 else MUCH for number in range(len(load))]
    arrivals = with_owners(load, owners)
    for policy in ("fair", "arrival"):
        simulation = Simulation(gang=SimulatedGang(steps=STEPS, num_ranks=2), policy=make_policy(policy))
        simulation.run(arrivals)
        by_owner = shares(served(simulation, arrivals, owners, lone_s))["owners"]
        found[policy] = {name: one["share"] for name, one in by_owner.items()}
    return found


def test_fair_shares_are_as_weights_say_and_others_are_not(under_overload: dict[str, dict[str, float]]) -> None:
    assert SHARES, "of sizes that differ by an order of magnitude"
    assert under_overload["fair"]["little"] == pytest.approx(0.75, abs=0.08)
    assert under_overload["arrival"]["little"] == pytest.approx(0.5, abs=0.15)
