"""The simulation agrees with recorded runs of a real cluster, and these runs are measured right."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.load.mix import Arrival
from benchmarks.serving.fake_nodes import FakeCluster
from benchmarks.serving.known_steps import STEP_S
from benchmarks.simulate_cluster.comparison import Run, simulated, waves
from benchmarks.simulate_cluster.fake_cluster import (
    FIRST_S,
    PAUSE_S,
    RECORDED,
    SETTING,
    Recording,
    compare,
    replays,
    trace,
)

COMPARED = ("mean_latency_s", "p90_latency_s", "gang_s", "node_s")


def recorded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RECORDED / f"fake_cluster_{name}.json").read_text())
    return document


@pytest.mark.parametrize(("name", "most_gangs"), [("dense", 3), ("sparse", 2), ("two_waves", 3)])
def test_the_simulation_agrees_with_a_recorded_run_of_a_real_cluster(name: str, most_gangs: int) -> None:
    """Figures are within 15 % on the same arrivals, with the measured times of steps and starts."""
    document = recorded(name)
    arrivals = [Arrival(at_s=at_s, kind=SETTING.mix.named(kind), seed=0) for at_s, kind, _ in document["latencies_s"]]
    figures = simulated(arrivals, document["times"], SETTING).figures()
    assert document["real"]["most_gangs"] >= most_gangs
    for figure in COMPARED:
        assert figures[figure] == pytest.approx(document["real"][figure], rel=0.15), figure
    assert figures == pytest.approx(document["simulated"]), "the report's figures"


def test_a_run_that_hangs_on_one_moment_agrees_at_one_of_ten() -> None:
    """A request comes when the last gang ends. Gang-seconds and node-seconds agree whichever comes first."""
    found = [ratios for _, ratios in replays(recorded("two_waves_again"))]
    for ratios in found:
        assert (ratios["gang_s"], ratios["node_s"]) == pytest.approx((1.0, 1.0), abs=0.15)
    assert any([ratios[figure] for figure in COMPARED] == pytest.approx([1.0] * 4, abs=0.15) for ratios in found)
    assert not all(ratios["p90_latency_s"] == pytest.approx(1.0, abs=0.15) for ratios in found), "it hangs on it"


def test_a_replay_shifts_requests_beside_decisions() -> None:
    document = recorded("two_waves")
    (first_s, first), *others = replays(document)
    assert first_s == 0.0
    assert first == pytest.approx(document["ratio"])
    assert [delay_s for delay_s, _ in others] == pytest.approx([tenths / 10 for tenths in range(1, 10)])
    assert any(ratios != pytest.approx(first) for _, ratios in others)


@pytest.mark.ray
@pytest.mark.slow
def test_the_simulation_agrees_with_a_sparse_wave_of_a_real_cluster() -> None:
    document = compare(num_waves=1, wave_s=90.0, load=0.5, seed=1).document()
    for figure in COMPARED:
        assert document["ratio"][figure] == pytest.approx(1.0, abs=0.15), document


def test_waves_rise_and_fall_with_pauses_before_them() -> None:
    num_waves, wave_s, mean_s = 200, 100.0, STEP_S * SETTING.mix.mean(SETTING.steps)
    first, *arrivals = trace(num_waves, wave_s, load=1.5, seed=1)
    assert [first, *arrivals] == trace(num_waves, wave_s, load=1.5, seed=1)
    assert first.at_s == FIRST_S
    into_s = [one.at_s % (PAUSE_S + wave_s) - PAUSE_S for one in arrivals]
    assert min(into_s) > 0.0
    tops, feet = (sum(low <= one < low + 20 for one in into_s) for low in (40.0, 0.0))
    assert tops == pytest.approx(num_waves * 20 * 1.5 / mean_s, rel=0.15)
    assert feet < 0.3 * tops
    assert {one.kind.name for one in arrivals} == {"short", "long"}


@pytest.mark.parametrize(("seed", "problem"), [(1, "0 requests .* long or short:"), (4, "2 requests .* long:")])
def test_a_wave_without_a_class_of_requests_is_refused(seed: int, problem: str) -> None:
    """It is refused before it is sent: the times of that class could not be measured."""
    with pytest.raises(ValueError, match=problem):
        waves(SETTING.mix, mean_s=16.0, num=1, wave_s=30.0, pause_s=0.0, load=1.0, seed=seed)


def test_starts_and_ends_of_gangs_and_nodes_are_told_apart() -> None:
    """A gang is ordered at 100 s, its node begins at 103 and it runs at 110; another one needs no new node.

    The second node ends while a gang of the first one still runs.
    """
    recording = Recording(begin_s=100.0)

    def look(at_s: float, replicas: dict[str, tuple[str, float, str]], *nodes: str) -> None:
        seen = SimpleNamespace(
            replicas=lambda deployment: [
                {"replica_id": name, "node_id": node, "state": state, "start_time_s": ordered_s}
                for name, (state, ordered_s, node) in replicas.items()
            ],
            workers=lambda: [SimpleNamespace(node_id=node) for node in nodes],
        )
        recording.look(cast(FakeCluster, seen), at_s)

    look(101.0, {"first": ("STARTING", 100.0, "a")})
    look(103.0, {"first": ("STARTING", 100.0, "a")}, "a")
    look(110.0, {"first": ("RUNNING", 100.0, "a")}, "a")
    look(120.0, {"other": ("STARTING", 118.0, "b")}, "a", "b")
    look(121.0, {"second": ("STARTING", 121.0, "a"), "other": ("RUNNING", 118.0, "b")}, "a", "b")
    look(126.0, {"second": ("RUNNING", 121.0, "a"), "other": ("RUNNING", 118.0, "b")}, "a", "b")
    look(130.0, {"second": ("RUNNING", 121.0, "a")}, "a", "b")
    look(137.0, {"second": ("RUNNING", 121.0, "a")}, "a", "b")
    look(138.0, {"second": ("RUNNING", 121.0, "a")}, "a")
    look(140.0, {}, "a")
    look(145.0, {}, "a")
    look(146.0, {})
    assert recording.starts() == {
        "node_starts_s": [3.0, 2.0],
        "gang_starts_s": [7.0, 1.0, 5.0],
        "node_idle_s": 6.0,
    }
    assert recording.moments[2] == (10.0, 1, 1)
    run = Run(latencies_s=[1.0, 3.0], moments=recording.moments, num_starts=3)
    assert run.figures() == {
        "mean_latency_s": 2.0,
        "p90_latency_s": 3.0,
        "gang_s": 10.0 + 5.0 + 2 * 4.0 + 10.0,
        "node_s": 17.0 + 2 * 18.0 + 8.0,
        "num_starts": 3,
        "most_gangs": 2,
    }
