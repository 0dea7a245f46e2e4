"""GPU-hours, attainment and waits of a cluster under a day's traffic, by discrete events.

    python -m benchmarks.simulate_cluster [--gpus 8 64] [--hours 24] [--target-wait-s 10] [--shape gentd26]
    python -m benchmarks.simulate_cluster --share 1 2 4 [--own 1 2] [--load 0.3]

Compares scaling by predicted work (the objects that Ray Serve calls) with Ray Serve's counting of requests and with
clusters of a fixed size, on the same trace. A picture is in time if it waits for others no longer than the target.
Nodes cost from their order to their end. The last line is one JSON document.

``--share`` compares four models that take turns on the same GPUs (the arbiter that a share group asks) with a gang for
each model on GPUs of its own (``--own``), on the same trace. A picture is in time if it takes no longer than alone on
one GPU, and the target wait.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks.simulate_cluster.cluster import Cluster, ClusterSpec, Strategy
from benchmarks.simulate_cluster.day import SHAPES, DayTraffic
from benchmarks.simulate_cluster.shared_gpus import (
    MODELS,
    AllAwake,
    ByArbiter,
    ByArrival,
    ModelRequest,
    SharedGpus,
    Turns,
    with_models,
)
from benchmarks.simulate_cluster.strategies import ByRequests, ByWork, FixedSize
from engines.gang.autoscaling import ScalingRules

SCHEDULERS = "of gangs: a real one's, step by step, or its policy job by job (default for more than 16 GPUs)"
MOST_BY_STEPS = 16
"""GPUs up to which gangs have the scheduler of a real one by default."""
WARM_SHARE = 1.3
"""Gangs that run at the beginning, as a multiple of the load then."""


def main() -> None:
    arguments = parse()
    rows = sharing_rows(arguments) if arguments.share else scaling_rows(arguments)
    print(json.dumps({**vars(arguments), "rows": rows}))


def scaling_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each strategy for one model on each number of GPUs."""
    rows = []
    for num_gpus in arguments.gpus:
        spec, day = cluster_of(arguments, num_gpus), day_of(arguments, num_gpus)
        least_gpu_hours = day.mean_s * day.num_ranks / 3.6  # of 1000 pictures on gangs that are never idle
        print(f"{num_gpus} GPUs: at least {least_gpu_hours:.3f} GPU-h/1000", file=sys.stderr, flush=True)
        for name, strategy, policy in strategies(spec, arguments):
            by_steps = arguments.scheduler == "real" if arguments.scheduler else num_gpus <= MOST_BY_STEPS
            figures = simulate(spec, day, strategy, arguments.target_wait_s, policy, by_steps=by_steps)
            row = {"gpus": num_gpus, "strategy": name, "scheduler": "real" if by_steps else "jobs", **figures}
            print(line(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def cluster_of(arguments: argparse.Namespace, num_gpus: int) -> ClusterSpec:
    return ClusterSpec(
        num_gpus=num_gpus,
        gpus_per_node=min(arguments.gpus_per_node, num_gpus),
        num_ranks=arguments.num_ranks,
        node_starts_s=(arguments.node_start_s,),
        gang_starts_s=(arguments.gang_start_s,),
        min_gangs=arguments.min_gangs,
    )


def day_of(arguments: argparse.Namespace, num_gpus: int) -> DayTraffic:
    return DayTraffic(
        peak_load=arguments.load * num_gpus / arguments.num_ranks,
        num_ranks=arguments.num_ranks,
        from_hour=arguments.from_hour,
        hours=arguments.hours,
        seed=arguments.seed,
        shape=arguments.shape,
    )


def strategies(spec: ClusterSpec, arguments: argparse.Namespace) -> Iterator[tuple[str, Strategy, str]]:
    """Yield what is compared: name, strategy and order of jobs in a gang."""
    rules = ScalingRules(target_wait_s=arguments.target_wait_s, min_gangs=spec.min_gangs, max_gangs=spec.max_gangs)
    yield "work", ByWork(rules), "shortest"
    if spec.gangs_per_node > 1:
        yield "work, whole nodes", ByWork(replace(rules, gangs_per_node=spec.gangs_per_node)), "shortest"
    for policy in arguments.policies:
        suffix = ", by arrival" if policy == "arrival" else ""
        for target in arguments.ongoing:
            yield f"requests, {target:g} each{suffix}", ByRequests(spec.min_gangs, spec.max_gangs, target), policy
        for share in arguments.fixed:
            yield f"fixed, {share:.0%}{suffix}", FixedSize(max(1, round(share * spec.max_gangs))), policy


def simulate(
    spec: ClusterSpec,
    day: DayTraffic,
    strategy: Strategy,
    target_wait_s: float,
    policy: str = "shortest",
    *,
    by_steps: bool = True,
) -> dict[str, Any]:
    """Return the figures of one run."""
    cluster, begin_s = Cluster(spec, strategy, policy=policy, by_steps=by_steps), time.perf_counter()
    warm = min(spec.max_gangs, max(spec.min_gangs, 1 + round(WARM_SHARE * day.load_at(0))))
    cluster.run(day.arrivals(), strategy.num_gangs if isinstance(strategy, FixedSize) else warm)
    waits_s = sorted(cluster.waits_s)
    row: dict[str, Any] = {
        "num": len(waits_s),
        "gpu_hours": cluster.gpu_s / 3600,
        "gpu_hours_per_1000": cluster.gpu_s / 3.6 / len(waits_s),
        "in_time": sum(wait_s <= target_wait_s for wait_s in waits_s) / len(waits_s),
        "mean_wait_s": fmean(waits_s),
        "median_wait_s": median(waits_s),
        "p99_wait_s": waits_s[int(0.99 * len(waits_s))],
        "num_changes": cluster.num_changes,
        "num_failures": cluster.num_failures,
        "took_s": time.perf_counter() - begin_s,
    }
    if isinstance(strategy, ByWork):
        row["decision_ms"], row["choice_ms"] = spread(strategy.decisions_ms), spread(strategy.choices_ms)
    return row


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": median(ordered), "p99": ordered[int(0.99 * len(ordered))]}


def sharing_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of models that share GPUs, and of models with GPUs of their own."""
    day = DayTraffic(
        peak_load=arguments.load * len(MODELS),
        num_ranks=1,
        from_hour=arguments.from_hour,
        hours=arguments.hours,
        seed=arguments.seed,
        shape=arguments.shape,
    )
    requests, rows = with_models(day.arrivals()), []
    for name, num_gpus, groups in layouts(arguments):
        figures = share(groups, requests, day, arguments.target_wait_s)
        row = {"layout": name, "gpus": num_gpus, "gpu_hours_per_1000": 1e3 * num_gpus * day.hours / len(requests)}
        rows.append(row | figures)
        print(sharing_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def layouts(arguments: argparse.Namespace) -> Iterator[tuple[str, int, list[SharedGpus]]]:
    """Yield what is compared: name, number of GPUs, and the groups of models."""
    for num_ranks in arguments.own:
        groups = [SharedGpus([model], num_ranks, AllAwake()) for model in MODELS]
        yield f"{num_ranks} for each model", num_ranks * len(MODELS), groups
    turns: tuple[tuple[str, Turns], ...]
    for num_ranks in arguments.share:
        turns = (("the arbiter", ByArbiter(MODELS)), ("arrival", ByArrival()))
        for name, one in turns:
            yield f"{num_ranks} shared, by {name}", num_ranks, [SharedGpus(MODELS, num_ranks, one)]


def share(
    groups: Sequence[SharedGpus], requests: Sequence[ModelRequest], day: DayTraffic, target_wait_s: float
) -> dict[str, Any]:
    """Return the figures of one layout."""
    for group in groups:
        names = {model.name for model in group.models}
        group.run(request for request in requests if request.model in names)
    latencies = [one for group in groups for one in group.latencies_s]
    latencies_s = sorted(latency_s for _, latency_s in latencies)
    decisions_ms = [ms for group in groups if isinstance(group.turns, ByArbiter) for ms in group.turns.decisions_ms]
    return {
        "num": len(latencies),
        "in_time": sum(latency_s <= day.lone_s[size] + target_wait_s for size, latency_s in latencies) / len(latencies),
        "mean_s": fmean(latencies_s),
        "median_s": median(latencies_s),
        "p99_s": latencies_s[int(0.99 * len(latencies_s))],
        "num_swaps": sum(group.num_swaps for group in groups),
        "swap_share": sum(group.swap_s for group in groups) / (3600 * day.hours),
    } | ({"decision_ms": spread(decisions_ms)} if decisions_ms else {})


def sharing_line(row: dict[str, Any]) -> str:
    return (
        f"{row['gpus']:3} GPUs, {row['layout']:24} {row['gpu_hours_per_1000']:7.3f} GPU-h/1000, "
        f"{row['in_time']:7.2%} in time, latency mean {row['mean_s']:7.2f} median {row['median_s']:6.2f} "
        f"p99 {row['p99_s']:8.2f} s, {cpu_times(row)}{row['num_swaps']} swaps ({row['swap_share']:.1%} of the time)"
    )


def cpu_times(row: dict[str, Any]) -> str:
    return "".join(
        "{median:.3f} ms (p99 {p99:.3f}) a {name}, ".format(**row[f"{name}_ms"], name=name)
        for name in ("decision", "choice")
        if f"{name}_ms" in row
    )


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['gpus']:5} GPUs {row['strategy']:30} {row['scheduler']:4} {row['gpu_hours_per_1000']:7.3f} GPU-h/1000, "
        f"{row['in_time']:7.2%} in time, wait mean {row['mean_wait_s']:6.2f} p99 {row['p99_wait_s']:7.2f} s, "
        f"{row['num_changes']} changes, {cpu_times(row)}{row['num']} pictures in {row['took_s']:.0f} s"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.simulate_cluster", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--num-ranks", type=int, default=2, choices=[1, 2, 4], help="GPUs of a gang")
    parser.add_argument("--gpus-per-node", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.6, help="of all GPUs, at the day's peak, bursts aside")
    parser.add_argument("--target-wait-s", type=float, default=10.0)
    parser.add_argument("--node-start-s", type=float, default=240.0)
    parser.add_argument("--gang-start-s", type=float, default=28.0)
    parser.add_argument("--scheduler", choices=("real", "jobs"), help=SCHEDULERS)
    parser.add_argument("--min-gangs", type=int, default=1)
    parser.add_argument("--shape", default="peaks", choices=SHAPES, help="of the load: two peaks, or a public trace")
    parser.add_argument("--from-hour", type=float, default=0.0)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--ongoing", type=float, nargs="*", default=[1.0, 2.0], help="target_ongoing_requests of Serve")
    parser.add_argument("--fixed", type=float, nargs="*", default=[1.0, 0.8], help="shares of all GPUs")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=("shortest", "arrival"),
        default=["shortest", "arrival"],
        help="order of jobs in the gangs that do not scale by work: arrival is first come, first served",
    )
    parser.add_argument("--share", type=int, nargs="*", default=[], help="GPUs that four models share: 1, 2 or 4")
    parser.add_argument("--own", type=int, nargs="*", default=[1], help="GPUs of each model: 1, 2 or 4")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
