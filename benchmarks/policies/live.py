"""The same load live and simulated: what the application does under each policy, beside its plans gone through.

    python -m benchmarks.policies.live [--policies shortest,arrival] [--mix laptop] [--rate 0.8] [--duration-s 60]

Serves ``--config`` under each policy. What each class takes alone is measured first, by stages; then the load is sent
over HTTP, and the same arrivals go through the scheduler and the policy themselves, each model's through a gang of its
own, once with steps as long as alone and once as long as they were in that run (``stretch`` times as long: gangs share
the cores with each other, with clients, and with whatever else runs). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.arrivals import Arrival, poisson
from benchmarks.load.client import TIMEOUT_S, Outcome, answered, send_all
from benchmarks.load.mix import Mix, RequestClass, load_mix
from benchmarks.policies.simulation import Arrival as SimulatedArrival
from benchmarks.policies.simulation import SimulatedGang, Simulation
from benchmarks.serving.application import serving
from deployments.cli.serving import free_port, load_config, parse_config
from deployments.config import ServeConfig
from engines.gang.policies.registry import POLICIES, make_policy

NUM_LONE = 3
STEPS = "troupe_step_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """What a request of a class takes by itself: its model's steps, and all else that belongs to it."""

    model: str
    num_steps: int
    step_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GangLimits:
    """Of a model's gang, as the configuration says."""

    num_ranks: int
    max_running_jobs: int
    plans_ahead: int


def main() -> None:
    arguments = parse()
    mix = load_mix(arguments.mix)
    arrivals = poisson(mix, arguments.rate, arguments.duration_s, arguments.seed)
    rows = []
    for policy in arguments.policies.split(","):
        port = free_port("127.0.0.1")
        config = with_policy(load_config(arguments.config).with_metrics(port), policy)
        with serving(config) as application:
            row = asyncio.run(compared(application.url, f"http://127.0.0.1:{port}/metrics", config, policy, arrivals))
        rows.append({**row, "load": round(os.getloadavg()[0], 1)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"mix": arguments.mix, "rate": arguments.rate, "seed": arguments.seed, "rows": rows}))


def with_policy(config: ServeConfig, policy: str) -> ServeConfig:
    """Returns ``config`` with that policy in every gang."""
    document = config.model_dump(mode="json")
    for model in document["applications"][0]["args"]["models"]:
        model["denoiser"]["policy"] = policy
    return parse_config(document)


async def compared(
    url: str, metrics_url: str, config: ServeConfig, policy: str, arrivals: Sequence[Arrival]
) -> dict[str, Any]:
    """Mean seconds by class: live, and simulated with steps as alone and as in the run."""
    kinds = {one.kind.name: one.kind for one in arrivals}
    alone = await measured_alone(url, Mix(classes=tuple(kinds.values())))
    before = steps_of(httpx.get(metrics_url, timeout=30).text)
    outcomes = await send_all(url, arrivals, {})
    after = steps_of(httpx.get(metrics_url, timeout=30).text)
    stretch = stretches(before, after, alone, arrivals)
    gangs = {
        model.name: GangLimits(
            num_ranks=model.denoiser.num_ranks,
            max_running_jobs=model.denoiser.max_running_jobs,
            plans_ahead=model.denoiser.plans_ahead,
        )
        for model in config.app.models
    }
    as_alone = simulated(policy, gangs, alone, arrivals, dict.fromkeys(stretch, 1.0))
    as_in_run = simulated(policy, gangs, alone, arrivals, stretch)
    return {
        "policy": policy,
        "statuses": sorted({one.status for one in outcomes}),
        "stretch": {model: round(value, 2) for model, value in stretch.items()},
        "classes": {
            name: row_of([i for i, one in enumerate(arrivals) if one.kind.name == name], outcomes, as_alone, as_in_run)
            for name in kinds
        },
        "all": row_of(range(len(arrivals)), outcomes, as_alone, as_in_run),
    }


async def measured_alone(url: str, mix: Mix) -> dict[str, Alone]:
    """Medians of a few requests of each class, the first not counted. RuntimeError if one is not answered."""
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        for kind in mix.classes:
            card = (await client.get(f"/v1/models/{kind.body['model']}")).json()
            num_steps = int(kind.body.get("num_inference_steps", card["defaults"]["num_inference_steps"]))
            several = []
            for seed in range(NUM_LONE + 1):
                began_s = asyncio.get_running_loop().time()
                status, stages_ms = await answered(client, kind, seed)
                if status != httpx.codes.OK:
                    raise RuntimeError(f"a request of class {kind.name} alone was answered {status}")
                several.append((asyncio.get_running_loop().time() - began_s, stages_ms["denoise"] / 1e3))
            denoise_s = median(denoise for _, denoise in several[1:])
            other_s = median(took - denoise for took, denoise in several[1:])
            model = str(kind.body["model"])
            found[kind.name] = Alone(model=model, num_steps=num_steps, step_s=denoise_s / num_steps, other_s=other_s)
    return found


def steps_of(page: str) -> dict[str, tuple[float, float]]:
    """Seconds in steps, and how many, by model."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (f"{STEPS}_sum", f"{STEPS}_count"):
                found[sample.labels["model"]][sample.name.endswith("_count")] += sample.value
    return {model: (seconds, count) for model, (seconds, count) in found.items()}


def stretches(
    before: Mapping[str, tuple[float, float]],
    after: Mapping[str, tuple[float, float]],
    alone: Mapping[str, Alone],
    arrivals: Sequence[Arrival],
) -> dict[str, float]:
    """How many times as long as alone the steps of each model were, all of those that were made between two looks."""
    expected_s: defaultdict[str, float] = defaultdict(float)
    for arrival in arrivals:
        one = alone[arrival.kind.name]
        expected_s[one.model] += one.num_steps * one.step_s
    return {model: (after[model][0] - before.get(model, (0.0, 0.0))[0]) / s for model, s in expected_s.items()}


def simulated(
    policy: str,
    gangs: Mapping[str, GangLimits],
    alone: Mapping[str, Alone],
    arrivals: Sequence[Arrival],
    stretch: Mapping[str, float],
) -> list[float]:
    """Seconds of each arrival."""
    latencies_s = [0.0] * len(arrivals)
    for model in {one.model for one in alone.values()}:
        shape = gangs[model]
        own = [i for i, arrival in enumerate(arrivals) if alone[arrival.kind.name].model == model]
        gang = SimulatedGang(
            steps={
                name: {shape.num_ranks: stretch[model] * one.step_s}
                for name, one in alone.items()
                if one.model == model
            },
            num_ranks=shape.num_ranks,
            max_running_jobs=shape.max_running_jobs,
            plans_ahead=shape.plans_ahead,
        )
        jobs = [_job(arrivals[i].at_s, arrivals[i].kind, alone) for i in own]
        for number, latency_s in Simulation(gang=gang, policy=make_policy(policy)).run(jobs).items():
            latencies_s[own[number]] = latency_s + alone[arrivals[own[number]].kind.name].other_s
    return latencies_s


def _job(at_s: float, kind: RequestClass, alone: Mapping[str, Alone]) -> SimulatedArrival:
    return SimulatedArrival(at_s=at_s, shape=kind.name, num_steps=alone[kind.name].num_steps)


def row_of(
    numbers: Sequence[int], outcomes: Sequence[Outcome], as_alone: Sequence[float], as_in_run: Sequence[float]
) -> dict[str, float]:
    """Means over the requests that were answered right; ``live_by_simulated`` is 1 where they agree."""
    right = [i for i in numbers if outcomes[i].is_right]
    live_s = fmean(outcomes[i].latency_s for i in right)
    run_s = fmean(as_in_run[i] for i in right)
    return {
        "requests": len(numbers),
        "live_s": round(live_s, 3),
        "simulated_as_alone_s": round(fmean(as_alone[i] for i in right), 3),
        "simulated_as_in_run_s": round(run_s, 3),
        "live_by_simulated": round(live_s / run_s, 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--mix", default="laptop", help="a YAML file of classes, or the name of a known one")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
