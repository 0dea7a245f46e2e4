"""This machine's figures for the cost model, and what it forecasts with them.

    python -m benchmarks.planner.machine [--ranks 4] [--model FLUX.1-dev] [--out FILE]

Reads configurations only, no weights. The last line is one JSON document: the figures, and by size every candidate.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engines.core.spec import tiling_sizes
from engines.planner.cost_model import Workload
from engines.planner.forecast import StepForecast, forecast, workload
from engines.planner.measure import measure_here
from engines.planner.profile import ModelProfile, profile
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size

SIDES = (512, 1024, 2048)
SPACIOUS_BYTES = 2**40


def counted_and_works(model: str) -> tuple[ModelProfile, dict[int, Workload]]:
    """The model's costs, and by the side of a picture the step."""
    checkpoint = Checkpoint.of_configuration(model, "cpu", "bfloat16")
    outline = checkpoint.weightless()
    sizes = {side: Size(width=side, height=side) for side in SIDES}
    unguided = {side: checkpoint.defaults.request(size, true_cfg_scale=1.0) for side, size in sizes.items()}
    steps = {side: checkpoint.first_step(request) for side, request in unguided.items()}
    return profile(outline), {side: workload(outline, step) for side, step in steps.items()}


def candidates(plan: StepForecast) -> list[dict[str, Any]]:
    return [
        {"strategy": cost.spec.name, "chosen": cost is plan.chosen, "total_ms": round(cost.total_ms, 2)}
        | {name: round(value, 2) for name, value in asdict(cost).items() if name.endswith("_ms")}
        for cost in plan.costs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--model", default="FLUX.1-dev")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    counted, works = counted_and_works(arguments.model)
    machine = measure_here(counted, arguments.ranks, "cuda" if torch.cuda.is_available() else "cpu")
    document: dict[str, Any] = {"machine": json.loads(machine.to_json()), "results": []}
    print(machine.describe(), flush=True)
    spacious = replace(machine, memory_bytes=SPACIOUS_BYTES)  # the question is how long a step takes
    for side, work in works.items():
        for num_ranks in tiling_sizes(arguments.ranks):
            plan = forecast(counted, work, num_ranks, spacious)
            print(f"{side} x {side}, {num_ranks} ranks", plan.table(), sep="\n", flush=True)
            document["results"].append({"side": side, "num_ranks": num_ranks, "candidates": candidates(plan)})
    if arguments.out:
        arguments.out.write_text(json.dumps(document))
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
