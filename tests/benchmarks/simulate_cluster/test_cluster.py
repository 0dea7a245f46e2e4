"""The simulated cluster agrees with cases by hand, and its strategies behave as designed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from unittest.mock import patch

import pytest

from benchmarks.policies.h200 import NUM_STEPS, STEPS
from benchmarks.policies.simulation import Arrival, SimulatedGang, Simulation
from benchmarks.simulate_cluster import __main__ as program
from benchmarks.simulate_cluster.cluster import Cluster, ClusterSpec, Strategy
from benchmarks.simulate_cluster.day import MIX, PARTS_PER_HOUR, DayTraffic, public_heights
from benchmarks.simulate_cluster.replicas import (
    ClusterNode,
    JobReplica,
    Picture,
    PictureJob,
    SimulatedReplica,
    StepReplica,
)
from benchmarks.simulate_cluster.strategies import ByRequests, ByWork, FixedSize, Observed
from engines.gang.autoscaling import GangScaler, Observation, ScalingRules
from engines.gang.policies.policy import make_policy

SPEC = ClusterSpec(
    num_gpus=8,
    gpus_per_node=4,
    num_ranks=2,
    node_starts_s=(100.0,),
    gang_starts_s=(20.0,),
    node_idle_s=50.0,
    failures_per_gpu_hour=0.0,
)
RULES = ScalingRules(target_wait_s=10.0, min_gangs=0, max_gangs=4, idle_s=60.0)
HOURS = DayTraffic(peak_load=4.8, num_ranks=2, from_hour=8.0, hours=3.0)

DECIDE = GangScaler.decide
BY_STEPS = pytest.mark.parametrize("by_steps", [True, False])
STEP_S = 1 / 64
BY_HAND = replace(SPEC, measured_step_s={"1024x1024": STEP_S})


def pictures(*at_and_lone_s: tuple[float, float]) -> list[Picture]:
    return [Picture(at_s, "1024x1024", round(lone_s / STEP_S)) for at_s, lone_s in at_and_lone_s]


@BY_STEPS
def test_one_gang_serves_the_shortest_first_and_no_picture_is_lost(by_steps: bool) -> None:
    """A picture of 10 s begins; ones of 2 and 0.5 s arrive: the shorter ones run at once, the long one ends last."""
    cluster = Cluster(BY_HAND, FixedSize(1), by_steps=by_steps)
    cluster.run(pictures((0.0, 10.0), (1.0, 2.0), (2.0, 0.5)), warm_gangs=1)
    num_ahead = 2 if by_steps else 0  # sent steps, which nothing overtakes
    assert sorted(cluster.waits_s) == pytest.approx([0.0, 0.5, 2.5], abs=num_ahead * STEP_S + 1e-9)


@BY_STEPS
def test_by_arrival_short_pictures_wait_for_the_long_one(by_steps: bool) -> None:
    cluster = Cluster(BY_HAND, FixedSize(1), policy="arrival", by_steps=by_steps)
    cluster.run(pictures((0.0, 10.0), (1.0, 2.0), (2.0, 0.5)), warm_gangs=1)
    assert sorted(cluster.waits_s) == pytest.approx([0.0, 9.0, 10.0])


def test_a_gang_has_the_scheduler_of_a_real_one() -> None:
    """The waits are those of ``benchmarks.policies``, whose early-sent step delays later arrivals."""
    arrivals = list(DayTraffic(peak_load=0.8, num_ranks=2, from_hour=20.0, hours=0.1, seed=2).arrivals())
    cluster = Cluster(SPEC, FixedSize(1))
    cluster.run(arrivals, warm_gangs=1)
    simulation = Simulation(SimulatedGang(steps=STEPS, num_ranks=2, team_sizes=(2,)), make_policy("shortest"))
    latencies_s = simulation.run([Arrival(at_s=one.at_s, shape=one.size, num_steps=NUM_STEPS) for one in arrivals])
    waits_s = [latencies_s[number] - NUM_STEPS * STEPS[one.size][2] for number, one in enumerate(arrivals)]
    assert len(waits_s) > 60
    assert sorted(cluster.waits_s) == pytest.approx(sorted(waits_s), abs=1e-6)


@BY_STEPS
def test_a_gang_reports_the_work_that_it_has_left(by_steps: bool) -> None:
    """It works for the policy, and waits for the router."""
    gang = (StepReplica if by_steps else JobReplica)("a", 0, ClusterNode(0.0, 0.0), BY_HAND.step_s, 0.0)
    for number, lone_s in enumerate([4.0, 2.0]):
        gang.take(PictureJob(number, "1024x1024", round(lone_s / STEP_S), lone_s, 0.0))
    reports = []
    for now_s in (0.0, 0.5, 1.0):
        while (next_s := gang.next_s) is not None and next_s <= now_s:
            gang.advance(next_s)
        gang.advance(now_s)
        reports.append((gang.report(), {name: one.left_s for name, one in gang.load().jobs.items()}))
    assert [report.backlog_s for report, _ in reports] == pytest.approx([6.0, 5.5, 5.0])
    assert [sum(left_s.values()) for _, left_s in reports] == pytest.approx([6.0, 5.5, 5.0])
    assert reports[-1][1]["0"] == pytest.approx(4.0, abs=2 * STEP_S), "the shorter one is worked on"
    assert (reports[-1][0].num_jobs, reports[-1][0].num_arrived, reports[-1][0].arrived_s2) == (2, 2, 20.0)
    assert {job.number for job in gang.fail()} == {0, 1}
    assert gang.next_s is None
    assert gang.report().backlog_s == 0.0


def test_waits_job_by_job_agree_with_those_of_the_scheduler() -> None:
    arrivals = list(DayTraffic(peak_load=0.8, num_ranks=2, from_hour=20.0, hours=0.3, seed=2).arrivals())
    waits_s: dict[bool, list[float]] = {}
    for by_steps in (True, False):
        cluster = Cluster(SPEC, FixedSize(1), by_steps=by_steps)
        cluster.run(arrivals, warm_gangs=1)
        waits_s[by_steps] = cluster.waits_s
    assert len(waits_s[True]) == len(waits_s[False]) > 200
    assert fmean(waits_s[False]) == pytest.approx(fmean(waits_s[True]), rel=0.15)
    late = [sum(wait_s > RULES.target_wait_s for wait_s in ones) for ones in waits_s.values()]
    assert late[0] == pytest.approx(late[1], rel=0.15)
    assert late[1] > 10


def test_nodes_cost_from_their_order_to_their_end() -> None:
    cluster = Cluster(BY_HAND, FixedSize(1))
    cluster.run(pictures((0.0, 10.0), (30.0, 20.0)), warm_gangs=1)
    assert cluster.gpu_s == pytest.approx(4 * 60.0), "a node of four GPUs up to the decision after the last picture"


def test_without_a_gang_a_request_waits_for_node_and_gang_which_end_when_nobody_asks() -> None:
    cluster = Cluster(BY_HAND, ByWork(RULES))
    cluster.run(pictures((10.0, 5.0), (1000.0, 5.0)), warm_gangs=0)
    assert cluster.waits_s == pytest.approx([120.0, 120.0], abs=2.0)
    assert cluster.gpu_s < 4 * 2 * (120 + 5 + RULES.idle_s + 30 + SPEC.node_idle_s + 10)
    assert cluster.num_changes >= 3


def test_a_cluster_that_may_be_empty_runs_until_it_is() -> None:
    strategy = Observed(ByWork(RULES))
    cluster = Cluster(replace(BY_HAND, min_gangs=0, gang_starts_s=(20.0, 30.0)), strategy)
    cluster.run(pictures((10.0, 5.0), (1000.0, 5.0)), warm_gangs=0)
    assert cluster.waits_s == pytest.approx([120.0, 130.0], abs=2.0), "each start took as long as measured"
    assert (cluster.nodes, cluster.num_starts) == ([], 2)
    nodes_s = sum(nodes * (later_s - at_s) for (at_s, _, nodes), (later_s, *_) in pairwise(strategy.moments))
    assert 4 * (nodes_s + 2 * SPEC.node_starts_s[0]) == pytest.approx(cluster.gpu_s, abs=8), (
        "nodes that start cost as well"
    )
    assert max(at_s for at_s, gangs, _ in strategy.moments if gangs) < 1135 + RULES.idle_s + 130


@dataclass
class Alternating:
    """Adds and removes one gang in turn, whatever happens."""

    every_s: float = 3.0
    num: int = 2

    def target(self, now_s: float, cluster: Cluster) -> int:
        self.num = 3 - self.num
        return self.num

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        return running[-1]


def test_a_policy_by_work_sees_gangs_as_they_were_at_the_last_decision() -> None:
    """The gang has its job from 120 s on. The scaler, which is called from then on, sees it a decision later."""
    seen: list[tuple[float, int, float]] = []
    strategy = ByWork(RULES)
    cluster = Cluster(replace(BY_HAND, min_gangs=0), strategy)

    def decide(scaler: GangScaler, observation: Observation) -> int:
        seen.extend((observation.now_s, one.num_jobs, one.num_arrived) for one in observation.gangs.values())
        return DECIDE(scaler, observation)

    with patch.object(GangScaler, "decide", decide):
        cluster.run(pictures((0.5, 2.0)), warm_gangs=0)
    assert seen[:4] == [(121.0, 1, 0), (122.0, 1, 1), (123.0, 1, 1), (124.0, 0, 1)]


def test_a_gang_by_work_stays_while_a_request_is_open() -> None:
    """The second request comes when the gang has been idle for ``idle_s``, before a report says so."""
    num_starts = {}
    for at_s in (182.4, 190.0):
        cluster = Cluster(replace(BY_HAND, min_gangs=0), ByWork(RULES))
        cluster.run(pictures((0.5, 2.0), (at_s, 3.0), (at_s + 2, 1.0)), warm_gangs=0)
        num_starts[at_s] = cluster.num_starts
    assert num_starts == {182.4: 1, 190.0: 2}


@pytest.mark.parametrize(("places", "ended"), [([0, 1], 0), ([0, 0, 1], 2), ([0, 1, 1], 0), ([0, 0], 1)])
def test_the_gang_that_ends_is_the_newest_of_the_emptiest_node_and_of_equal_nodes_the_oldest(
    places: list[int], ended: int
) -> None:
    """Ray Serve 2.60 chooses like this (``DeploymentScheduler._get_replicas_to_stop``)."""
    cluster, nodes = Cluster(BY_HAND, FixedSize(1)), [ClusterNode(0.0, 0.0), ClusterNode(0.0, 0.0)]
    for number, place in enumerate(places):
        gang = StepReplica(f"gang{number}", number, nodes[place], BY_HAND.step_s, 0.0)
        gang.is_running = True
        nodes[place].gangs.add(gang)
        cluster.gangs.append(gang)
    assert cluster.next_to_end().number == ended


def test_a_gang_that_ends_finishes_its_jobs() -> None:
    cluster = Cluster(replace(BY_HAND, gang_starts_s=(0.0,)), Alternating())
    cluster.run(pictures(*((float(at_s), 4.0) for at_s in range(0, 60, 2))), warm_gangs=2)
    assert len(cluster.waits_s) == 30
    assert min(cluster.waits_s) >= -1e-9


def test_jobs_of_a_failed_gang_run_again() -> None:
    cluster = Cluster(replace(SPEC, failures_per_gpu_hour=60.0), FixedSize(4))
    arrivals = list(replace(HOURS, peak_load=1.5, hours=0.3).arrivals())
    cluster.run(arrivals, warm_gangs=4)
    assert len(cluster.waits_s) == len(arrivals)
    assert cluster.num_failures > 25


def test_a_day_has_its_shares_and_is_the_same_again() -> None:
    arrivals = list(HOURS.arrivals())
    assert arrivals == list(HOURS.arrivals())
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    for size, share in MIX.items():
        assert sum(one.size == size for one in arrivals) / len(arrivals) == pytest.approx(share, abs=0.02)
    assert HOURS.load_at(2.5 * 3600) == pytest.approx(4.8 * (0.08 + 0.92 * 0.85)), "the peak of the morning"
    assert replace(HOURS, from_hour=4.0).load_at(0) < 0.2 * 4.8


def test_the_public_trace_is_followed_in_parts_of_an_hour() -> None:
    """Its four days have 9,621 requests; the busiest hour needs ``peak_load`` gangs."""
    heights = public_heights()
    assert len(heights) == 4 * 24 * PARTS_PER_HOUR
    hours = [sum(heights[i : i + PARTS_PER_HOUR]) / PARTS_PER_HOUR for i in range(0, len(heights), PARTS_PER_HOUR)]
    assert max(hours) == pytest.approx(1.0)
    assert sum(hours) == pytest.approx(9621 / 400)
    day = replace(HOURS, shape="gentd26", from_hour=0.0, hours=96.0)
    busiest_s = 3600.0 * hours.index(max(hours))
    busy = [day.load_at(busiest_s + 600 * i) for i in range(PARTS_PER_HOUR)]
    assert sum(busy) / PARTS_PER_HOUR == pytest.approx(HOURS.peak_load)
    assert day.load_at(96 * 3600.0) == day.load_at(0.0), "it repeats"
    arrivals = list(replace(day, from_hour=busiest_s / 3600, hours=1.0).arrivals())
    assert len(arrivals) == pytest.approx(3600 * HOURS.peak_load / HOURS.mean_s, rel=0.1)


def test_by_work_fewer_gpu_hours_give_no_more_late_pictures() -> None:
    """Serve's defaults and the whole cluster run through the same morning."""
    spec = replace(SPEC, num_gpus=32, failures_per_gpu_hour=1 / 50_000)
    day = replace(HOURS, peak_load=9.6, from_hour=5.0)
    strategies: dict[str, Strategy] = {
        "work": ByWork(replace(RULES, max_gangs=16, min_gangs=1)),
        "requests": ByRequests(1, 16),
        "fixed": FixedSize(16),
    }
    rows = {name: program.simulate(spec, day, strategy, 10.0, by_steps=False) for name, strategy in strategies.items()}
    assert rows["work"]["gpu_hours"] < 0.9 * rows["requests"]["gpu_hours"]
    assert rows["work"]["gpu_hours"] < 0.6 * rows["fixed"]["gpu_hours"]
    assert rows["work"]["in_time"] >= rows["requests"]["in_time"]


def test_serves_own_policy_waits_before_it_changes_the_number() -> None:
    spec = replace(BY_HAND, node_starts_s=(0.0,), gang_starts_s=(0.0,))
    cluster = Cluster(spec, ByRequests(1, 4, upscale_delay_s=30.0, downscale_delay_s=600.0), by_steps=False)
    cluster.run(pictures(*((0.0, 300.0) for _ in range(8)), *((2000.0, 2.0),)), warm_gangs=1)
    assert cluster.num_changes == 2, "up to four, and down when all are done"


def test_the_last_line_is_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate_cluster", "--gpus", "8", "--hours", "0.05", "--from-hour", "9", "--ongoing", "2", "--fixed", "1"]
    monkeypatch.setattr("sys.argv", argv)
    program.main()
    printed = capsys.readouterr()
    document = json.loads(printed.out.splitlines()[-1])
    assert [row["strategy"] for row in document["rows"]] == [
        "work",
        "work, whole nodes",
        "requests, 2 each",
        "fixed, 100%",
        "requests, 2 each, by arrival",
        "fixed, 100%, by arrival",
    ]
    assert [*{row["scheduler"] for row in document["rows"]}] == ["real"], "a small cluster"
    assert document["rows"][0]["choice_ms"]["p99"] > 0
    assert "8 GPUs: at least" in printed.err
