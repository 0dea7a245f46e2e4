"""Simulated models that take turns on the same GPUs agree with cases by hand, and with GPUs of their own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.policies.h200 import NUM_STEPS, STEPS
from benchmarks.simulate_cluster import __main__ as program
from benchmarks.simulate_cluster.day import DayTraffic
from benchmarks.simulate_cluster.shared_gpus import (
    MODELS,
    AllAwake,
    ByArbiter,
    ByArrival,
    ModelRequest,
    SharedGpus,
    SharingModel,
    with_models,
)
from engines.gang.arbiter import LINGER_S

SIZE = "1024x1024"
LONE_S = NUM_STEPS * STEPS[SIZE][1]
LARGE = [SharingModel(name=name, share=0.5, weights_gib=45.0) for name in "ab"]
MOVE_S = 1.0
DAY = DayTraffic(peak_load=0.5 * len(MODELS), num_ranks=1, from_hour=9.0, hours=0.5)


def latencies(group: SharedGpus, *requests: tuple[float, str]) -> list[float]:
    group.run(ModelRequest(at_s, SIZE, model) for at_s, model in requests)
    return [latency_s for _, latency_s in group.latencies_s]


def test_a_request_waits_for_the_turn_of_the_other_model_and_for_both_swaps() -> None:
    first_s = MOVE_S + LONE_S
    second_s = first_s - 0.1 + LINGER_S + 2 * MOVE_S + LONE_S
    group = SharedGpus(LARGE, 1, ByArbiter(LARGE))
    assert latencies(group, (0.0, "a"), (0.1, "b")) == pytest.approx([first_s, second_s])
    assert (group.num_swaps, group.swap_s) == (2, 3 * MOVE_S)


def test_models_that_fit_work_together_and_each_takes_twice_as_long() -> None:
    small = [replace(model, weights_gib=22.5) for model in LARGE]
    later_s = latencies(SharedGpus(small, 1, ByArbiter(small)), (0.0, "a"), (0.0, "b"), (60.0, "a"), (60.0, "b"))[2:]
    assert later_s == pytest.approx([2 * LONE_S, 2 * LONE_S])
    own_s = latencies(SharedGpus(small[:1], 1, AllAwake()), (10.0, "a"), (60.0, "a"))
    assert own_s == pytest.approx([LONE_S, LONE_S]), "its weights are there from the begin"


def test_by_arrival_a_model_sleeps_between_any_two_of_its_requests() -> None:
    requests = [(0.1 * i, "ab"[i % 2]) for i in range(6)]
    by_arrival, by_arbiter = SharedGpus(LARGE, 1, ByArrival()), SharedGpus(LARGE, 1, ByArbiter(LARGE))
    late_s, early_s = (sum(latencies(group, *requests)) for group in (by_arrival, by_arbiter))
    assert (by_arrival.num_swaps, by_arbiter.num_swaps) == (6, 2)
    assert early_s < late_s


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_request_is_answered_and_no_work_is_lost(num_ranks: int) -> None:
    requests = with_models(DAY.arrivals())
    group = SharedGpus(MODELS, num_ranks, ByArbiter(MODELS))
    group.run(requests)
    assert len(group.latencies_s) == len(requests) > 100
    assert all(latency_s >= NUM_STEPS * STEPS[size][num_ranks] - 1e-6 for size, latency_s in group.latencies_s)
    work_s = sum(NUM_STEPS * STEPS[one.size][num_ranks] for one in requests)
    assert group.now_s >= work_s
    assert requests == with_models(DAY.arrivals()), "the same again"
    assert {one.model for one in requests} == {model.name for model in MODELS}


def test_four_models_on_the_same_four_gpus_are_faster_than_on_one_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "simulate_cluster",
        "--share",
        "4",
        "--own",
        "1",
        "2",
        "--hours",
        "0.5",
        "--from-hour",
        "9",
        "--load",
        "0.4",
    ]
    monkeypatch.setattr("sys.argv", argv)
    program.main()
    printed = capsys.readouterr()
    rows = {row["layout"]: row for row in json.loads(printed.out.splitlines()[-1])["rows"]}
    own, twice, arbiter, arrival = (
        rows[name]
        for name in ("1 for each model", "2 for each model", "4 shared, by the arbiter", "4 shared, by arrival")
    )
    assert own["num"] == arbiter["num"]
    assert own["gpu_hours_per_1000"] == arbiter["gpu_hours_per_1000"] == twice["gpu_hours_per_1000"] / 2
    assert arbiter["mean_s"] < own["mean_s"]
    assert arbiter["in_time"] > own["in_time"]
    assert arbiter["num_swaps"] < arrival["num_swaps"]
    assert arbiter["decision_ms"]["p99"] > 0
    assert "4 GPUs, 4 shared, by the arbiter" in printed.err
