"""The simulation beside a recorded run of a real cluster, and how that run was measured."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.load.mix import Arrival
from benchmarks.simulate_cluster.fake_cluster import MIX, PAUSE_S, RECORDED, Recording, Run, simulated, waves
from tests.deployments.support.fake_nodes import FakeNodes


def test_the_simulation_agrees_with_a_recorded_run_of_a_real_cluster() -> None:
    """Within 15 % on the same arrivals, with the measured times of steps and starts."""
    document = json.loads(RECORDED.read_text())
    arrivals = [Arrival(at_s=at_s, kind=MIX.named(name), seed=0) for at_s, name, _ in document["latencies_s"]]
    figures = simulated(arrivals, document["times"]).figures()
    assert document["real"]["most_gangs"] > 1
    for name in ("mean_latency_s", "p90_latency_s", "gang_s", "node_s"):
        assert figures[name] == pytest.approx(document["real"][name], rel=0.15), name
    assert figures == pytest.approx(document["simulated"]), "what the report says"


def test_waves_rise_and_fall_with_pauses_between_them() -> None:
    arrivals = waves(2, 100.0, load=1.5, mean_s=0.1, seed=1)
    assert arrivals == waves(2, 100.0, load=1.5, mean_s=0.1, seed=1)
    into_s = [one.at_s % (100.0 + PAUSE_S) for one in arrivals]
    assert max(into_s) < 100.0
    tops, feet = (sum(low <= one < low + 20 for one in into_s) for low in (40.0, 0.0))
    assert tops == pytest.approx(2 * 20 * 1.5 / 0.1, rel=0.15)
    assert feet < 0.3 * tops
    assert {one.kind.name for one in arrivals} == {"short", "long"}


def test_starts_and_ends_of_gangs_and_nodes_are_told_apart() -> None:
    """A gang is ordered at 100 s, its node begins at 103 and it runs at 110; another one needs no new node."""
    recording = Recording(begin_s=100.0)

    def look(at_s: float, replicas: dict[str, tuple[str, float]], *nodes: str) -> None:
        seen = SimpleNamespace(
            replicas=lambda deployment: [
                {"replica_id": name, "node_id": "a", "state": state, "start_time_s": ordered_s}
                for name, (state, ordered_s) in replicas.items()
            ],
            workers=lambda: [SimpleNamespace(node_id=node) for node in nodes],
        )
        recording.look(cast(FakeNodes, seen), at_s)

    look(101.0, {"first": ("STARTING", 100.0)})
    look(103.0, {"first": ("STARTING", 100.0)}, "a")
    look(110.0, {"first": ("RUNNING", 100.0)}, "a")
    look(120.0, {}, "a")
    look(121.0, {"second": ("STARTING", 121.0)}, "a")
    look(126.0, {"second": ("RUNNING", 121.0)}, "a")
    look(140.0, {}, "a")
    look(145.0, {})
    assert recording.starts() == {"node_starts_s": [3.0], "gang_starts_s": [7.0, 5.0], "node_idle_s": 5.0}
    assert recording.moments[2] == (10.0, 1, 1)
    run = Run(latencies_s=[1.0, 3.0], moments=recording.moments, num_starts=2)
    assert run.figures() == {
        "mean_latency_s": 2.0,
        "p90_latency_s": 3.0,
        "gang_s": 10.0 + 14.0,
        "node_s": 42.0,
        "num_starts": 2,
        "most_gangs": 1,
    }
