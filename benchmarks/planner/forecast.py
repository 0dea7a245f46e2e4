"""Whether ranks run strategies in the order of their predictions, all made and timed on this machine.

    torchrun --nproc_per_node 2 -m benchmarks.planner.forecast [--model wan-shapes] [--strategies NAME ...]

A step of two branches. Predictions come from a measurement of the ranks; strategies take turns, and the fastest of
some rounds counts. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

import torch
import torch.distributed as dist

from benchmarks.distributed import start_distributed
from benchmarks.timing import rank_synchronize
from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.parallel.mesh import Groups, Teams
from engines.planner.forecast import StepForecast, forecast, workload
from engines.planner.measure import measure
from engines.planner.profile import profile
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint

NUM_ROUNDS = 8
TRUE_CFG_SCALE = 2.0
"""Any above 1 gives a step its second branch."""


def predicted(model: DenoiserModel, branches: tuple[Branch, ...], device: torch.device) -> StepForecast:
    """What this machine's ranks, measured now, should take. All ranks call."""
    counted, num_ranks = profile(model), dist.get_world_size()
    specs = [ParallelSpec(ulysses=num_ranks)]
    teams = Teams(rank=dist.get_rank(), num_ranks=num_ranks, specs=specs, groups=Groups(num_ranks))
    return forecast(counted, workload(model, branches), num_ranks, measure(counted, teams, device))


def shortest_ms(
    model: DenoiserModel, branches: tuple[Branch, ...], strategies: Sequence[str], rounds: int
) -> dict[str, float]:
    """Milliseconds by strategy on this rank. All ranks call."""
    ranks = tuple(range(dist.get_world_size()))
    shortest = dict.fromkeys(strategies, float("inf"))
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(TorchEngine(model, strategy=name))) for name in strategies}
        for number in range(1 + rounds):
            for name, engine in engines.items():
                rank_synchronize()
                start_s = time.perf_counter()
                engine.predict(branches, ranks)
                rank_synchronize()
                if number:  # the first compiles and connects
                    shortest[name] = min(shortest[name], 1e3 * (time.perf_counter() - start_s))
    return shortest


def report(plan: StepForecast, ran_ms: dict[str, float]) -> dict[str, object]:
    predicted_ms = {cost.spec.name: round(cost.total_ms, 3) for cost in plan.costs if cost.spec.name in ran_ms}
    in_order = sorted(ran_ms, key=lambda name: ran_ms[name])
    return {
        "machine": plan.machine.name,
        "chosen": plan.chosen.spec.name,
        "predicted_ms": predicted_ms,
        "measured_ms": {name: round(ran_ms[name], 3) for name in in_order},
        "same_order": list(predicted_ms) == in_order,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan-shapes")
    parser.add_argument("--strategies", nargs="+", help="as the forecast calls them; all of them if none is given")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    arguments = parser.parse_args()
    rank, world = start_distributed()
    if world < 2:
        parser.error("one rank divides nothing: start two or more with torchrun --nproc_per_node")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    checkpoint = Checkpoint.open(arguments.model, device)
    model = checkpoint.denoiser()
    guided = checkpoint.defaults.request(true_cfg_scale=max(checkpoint.defaults.true_cfg_scale, TRUE_CFG_SCALE))
    branches = checkpoint.first_step(guided)
    plan = predicted(model, branches, device)
    if rank == 0:
        print(plan.table(), flush=True)
    strategies = arguments.strategies or [cost.spec.name for cost in plan.costs]
    ran_ms = shortest_ms(model, branches, strategies, arguments.rounds)
    if rank == 0:
        document = report(plan, ran_ms)
        for name, milliseconds in ran_ms.items():
            print(f"{name:<28}{milliseconds:>9.2f} ms")
        print(json.dumps(document), flush=True)
    rank_synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
