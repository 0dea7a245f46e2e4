"""Random arrivals under each policy, without GPUs: how long pictures wait, and how many are done in time.

    python -m benchmarks.policies [--gpus 2] [--load 0.75] [--num 3000] [--policies shortest,arrival] [--seed 1]
                                  [--owners three | none]

Steps take as long as measured on H200s. The load is the share of the time in which one gang of all GPUs would be busy.
A picture is in time within ``--scale`` times its lone time. ``--owners`` own the pictures; the policy ``fair`` follows
their weights. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.load.mix import Owner, load_owners
from benchmarks.policies.h200 import NUM_STEPS, SHARES, STEPS
from benchmarks.policies.simulation import Arrival, SimulatedGang, Simulation
from benchmarks.results import percentile
from benchmarks.serving.settings import argument_type
from engines.gang.policies.policy import POLICIES, make_policy

FILLED = 0.25
"""Share of the time until the first owner's last step ends, after which shares are counted."""


def main() -> None:
    arguments = parse()
    lone_s = {shape: NUM_STEPS * by_size[arguments.gpus] for shape, by_size in STEPS.items()}
    owners = arguments.owners.drawn(arguments.num, arguments.seed)
    arrivals = with_owners(poisson(arguments.num, arguments.load, lone_s, arguments.seed), owners)
    rows = []
    for policy in arguments.policies.split(","):
        for elastic in (False, True):
            gang = SimulatedGang(steps=STEPS, num_ranks=arguments.gpus, elastic=elastic)
            simulation = Simulation(gang=gang, policy=make_policy(policy))
            simulation.run(with_deadlines(arrivals, lone_s, arguments.scale) if policy == "deadline" else arrivals)
            row = {"policy": policy, "elastic": elastic, **summary(simulation, arrivals, lone_s, arguments.scale)}
            row["owners"] = by_owner(simulation, arrivals, owners, lone_s)
            print(line(row), file=sys.stderr, flush=True)
            rows.append(row)
    print(json.dumps({"gpus": arguments.gpus, "load": arguments.load, "seed": arguments.seed, "rows": rows}))


def poisson(num: int, load: float, lone_s: dict[str, float], seed: int) -> list[Arrival]:
    """Return independent arrivals of the usual sizes."""
    random, at_s, arrivals = Random(seed), 0.0, []
    mean_s = sum(share * lone_s[shape] for shape, share in SHARES.items()) / sum(SHARES.values())
    for _ in range(num):
        at_s += random.expovariate(load / mean_s)
        (shape,) = random.choices(list(SHARES), list(SHARES.values()))
        arrivals.append(Arrival(at_s=at_s, shape=shape, num_steps=NUM_STEPS))
    return arrivals


def with_owners(arrivals: Sequence[Arrival], owners: Sequence[Owner | None]) -> list[Arrival]:
    """Return the same arrivals with keys and weights, as a gang gets them."""
    known = [{} if owner is None else {"key": owner.name, "weight": owner.weight} for owner in owners]
    return [replace(one, fields={**one.fields, **fields}) for one, fields in zip(arrivals, known, strict=True)]


def by_owner(
    simulation: Simulation, arrivals: Sequence[Arrival], owners: Sequence[Owner | None], lone_s: dict[str, float]
) -> dict[str, Any]:
    """Return each owner's mean wait beyond the lone time, and its share of the ranks' seconds while all have work.

    Under overload, when queues have filled (``FILLED``), all have work until the first owner's last step ends. A fair
    gang then makes "share" equal "weight_share".
    """
    own = {owner: [i for i, one in enumerate(owners) if one == owner] for owner in dict.fromkeys(filter(None, owners))}
    until_s = min((max(simulation.steps[i][-1].end_s for i in mine) for mine in own.values()), default=0.0)
    rank_s = {
        owner: sum(
            span.rank_s for i in mine for span in simulation.steps[i] if FILLED * until_s <= span.end_s <= until_s
        )
        for owner, mine in own.items()
    }
    weights, all_s = sum(owner.weight for owner in own), sum(rank_s.values())
    return {
        owner.name: {
            "requests": len(mine),
            "mean_wait_s": round(fmean(simulation.latencies_s[i] - lone_s[arrivals[i].shape] for i in mine), 3),
            "weight_share": round(owner.weight / weights, 4),
            "share": round(rank_s[owner] / all_s, 4),
        }
        for owner, mine in sorted(own.items(), key=lambda pair: pair[0].name)
    }


def with_deadlines(arrivals: Sequence[Arrival], lone_s: dict[str, float], scale: float) -> list[Arrival]:
    return [replace(one, fields={**one.fields, "deadline_s": scale * lone_s[one.shape]}) for one in arrivals]


def summary(
    simulation: Simulation, arrivals: Sequence[Arrival], lone_s: dict[str, float], scale: float
) -> dict[str, Any]:
    """Return seconds and shares. ``eta_error`` is the median error of the finish that was predicted at arrival."""
    latencies_s = [simulation.latencies_s[i] for i in range(len(arrivals))]
    in_time = [scale * lone_s[one.shape] >= latency_s for one, latency_s in zip(arrivals, latencies_s, strict=True)]
    errors = [abs(simulation.predicted_s[i] - latency_s) / latency_s for i, latency_s in enumerate(latencies_s)]
    by_shape = {
        shape: fmean(s for one, s in zip(arrivals, latencies_s, strict=True) if one.shape == shape)
        for shape in SHARES
        if any(one.shape == shape for one in arrivals)
    }
    return {
        "attainment": round(fmean(in_time), 4),
        "mean_s": round(fmean(latencies_s), 2),
        "p95_s": round(percentile(latencies_s, 95), 2),
        "longest_s": round(max(latencies_s), 2),
        "mean_s_by_shape": {shape: round(mean_s, 2) for shape, mean_s in by_shape.items()},
        "moves": simulation.num_moves,
        "eta_error": round(median(errors), 4),
    }


def line(row: dict[str, Any]) -> str:
    kind = "elastic" if row["elastic"] else "one team"
    share = f"{100 * row['attainment']:.1f} % in time"
    times = f"mean {row['mean_s']} s, p95 {row['p95_s']}, {row['mean_s_by_shape']}"
    waits = ", ".join(
        f"{name} waits {one['mean_wait_s']:.2f} s, has {one['share']:.0%} of {one['weight_share']:.0%}"
        for name, one in row["owners"].items()
    )
    return f"{row['policy']:10} {kind:9} {share}, {times}; {waits}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--load", type=float, default=0.75)
    parser.add_argument("--num", type=int, default=3000, help="of pictures")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--owners", type=argument_type(load_owners), default="three", help="a file, a known name, or none"
    )
    parser.add_argument("--scale", type=float, default=3.0, help="a deadline, in times the lone time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
