"""Milliseconds per denoising step of FLUX.1-dev (random weights) on every number of ranks, beside its peers.

    python -m benchmarks.denoise_step [CASE ...]                            one GPU (or a small model on the CPU)
    torchrun --nproc_per_node 4 -m benchmarks.denoise_step [CASE ...]       four GPUs: 1, 2 and 4 ranks

A case is ``<maker>/<side>/w<ranks>[/<option>...]``, as ``--list`` prints them; an argument picks those that contain it,
and none picks the few that the goals are about.
The last line is one JSON document. Report: benchmarks/reports/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.denoise_step.elastic import NUM_JOBS
from benchmarks.denoise_step.runners import Bench
from benchmarks.distributed import start_distributed
from benchmarks.models import flux, wan
from benchmarks.results import status_of
from benchmarks.spread import Spread
from benchmarks.timing import measure, rank_synchronize
from benchmarks.turns import add_options, meeting_of

MOST_SAID = 1500
"""Characters of an error."""
REPEATS_A_ROUND = 5
BF16_TFLOPS, FP8_TFLOPS = 790.0, 1500.0
"""What an H200 reaches in a large bf16 product on random data, and about what is left of twice that in float8."""


def floor_ms(case: Case) -> float:
    """All arithmetic of the step at the rates above, divided over the ranks. Attention is bf16 in every case."""
    is_wan = case.maker == "wan"
    num_blocks = case.num_blocks or wan.LAYERS
    products, attention = wan.flop(case.side, num_blocks) if is_wan else flux.flop(case.side, batch=case.batch)
    rate = FP8_TFLOPS if case.precision == "fp8" else BF16_TFLOPS
    num_forwards = case.num_branches * case.num_steps * (NUM_JOBS if case.maker in ("always8", "elastic8") else 1)
    if case.maker == "switch":  # a step on one rank, and one on ``num_ranks``
        num_forwards *= 1 + case.num_ranks
    return num_forwards * (products / rate + attention / BF16_TFLOPS) / 1e9 / case.num_ranks


def main() -> None:
    arguments = parse(sys.argv[1:])
    rank, world = start_distributed()
    chosen = [case for case in CASES if case.can_run(world) and arguments.wants(case)]
    if arguments.list:
        print("\n".join(case.name for case in chosen))
        return
    say = print if rank == 0 else (lambda *_, **__: None)
    bench = Bench(rank=rank, world=world, small=not torch.cuda.is_available())
    say(f"{platform.node()}: {world} x {bench.device_name}, torch {torch.__version__}", flush=True)
    document: dict[str, Any] = {"hardware": f"{world} x {bench.device_name}", "torch": torch.__version__, "results": []}
    meeting = meeting_of(arguments, rank)
    ready, errors = prepare_all(bench, chosen, say) if meeting else ({}, {})
    if meeting:
        meeting.begin()
    if arguments.rounds:
        document["results"] = in_turns(bench, chosen, arguments.rounds, say)
        chosen = []
        if rank == 0 and arguments.out:
            Path(arguments.out).write_text(json.dumps(document))
    for case in chosen:
        if case in errors:
            document["results"].append({"case": case.name, "error": errors[case]})
        else:
            document["results"].append(run_case(bench, case, say, ready.get(case)))
        if rank == 0 and arguments.out:  # after every case: a later one may hang
            Path(arguments.out).write_text(json.dumps(document, indent=1))
    rank_synchronize()
    if meeting:
        meeting.leave()
    say(json.dumps(document), flush=True)
    os._exit(status_of(document["results"]))  # graphs hold the communicator: an orderly shutdown would wait for them


@torch.no_grad()
def prepare_all(bench: Bench, cases: list[Case], say: Any) -> tuple[dict[Case, Any], dict[Case, str]]:
    """Steps that have run twice, gave the right answer, and wait to be timed; and why the others do not."""
    ready: dict[Case, Any] = {}
    errors: dict[Case, str] = {}
    for case in cases:
        try:
            fitting = bench.fitting(case)
            step, _ = bench.prepare(fitting)
            bench.error(fitting, step())
            step()
            ready[case] = step
        except Exception:
            errors[case] = traceback.format_exc()[-MOST_SAID:]
            say(f"{case.name}: not ready\n{errors[case]}", flush=True)
    rank_synchronize()
    return ready, errors


@torch.no_grad()
def in_turns(bench: Bench, cases: list[Case], rounds: int, say: Any) -> list[dict[str, Any]]:
    """A few repeats of every case in each round, so that a GPU that warms up favours none: the medians' median."""
    ready, _ = prepare_all(bench, cases, say)
    medians: dict[str, list[float]] = {case.name: [] for case in ready}
    for _ in range(rounds):
        for case, step in ready.items():
            medians[case.name].append(
                measure(step, repeats=REPEATS_A_ROUND, warm_up=1, num_ranks=case.num_ranks).median_ms
            )
    results: list[dict[str, Any]] = []
    for case in ready:
        found = Spread.of(medians[case.name])
        results.append({"case": case.name, "rounds": rounds, "floor_ms": round(floor_ms(case), 2)})
        results[-1] |= {"median_ms": found.median, "lowest_ms": found.lowest, "highest_ms": found.highest}
        say(f"{case.name:58} median of {rounds} rounds {found}", flush=True)
    return results


@torch.no_grad()
def run_case(bench: Bench, case: Case, say: Any, step: Any = None) -> dict[str, Any]:
    try:
        if step is None:
            times, extra = bench.run(case)
        else:  # prepared, and seen to be right
            times, extra = measure(step, repeats=bench.fitting(case).repeats, num_ranks=case.num_ranks), {}
    except Exception:
        say(f"{case.name}: failed\n{traceback.format_exc()[-MOST_SAID:]}", flush=True)
        return {"case": case.name, "error": traceback.format_exc()[-MOST_SAID:]}
    told = f"median {times.median_ms:8.2f}  lowest {times.lowest_ms:8.2f}  p90 {times.p90_ms:8.2f} ms"
    result = {"case": case.name, **asdict(times), **extra}
    if bench.small:  # another model, on a machine of unknown rates
        say(f"small {case.name:52} {told}  {extra or ''}", flush=True)
        return result
    floor = floor_ms(case)
    share = floor / times.median_ms
    say(
        f"{case.name:58} floor {floor:7.2f}  {told}  {100 * share:4.0f} %  {times.clock_mhz} MHz {times.power_w} W  "
        f"{extra or ''}",
        flush=True,
    )
    return result | {"floor_ms": round(floor, 2), "share_of_floor": round(share, 3)}


class Arguments(argparse.Namespace):
    cases: tuple[str, ...]
    skip: tuple[str, ...]
    only: tuple[str, ...]
    out: str
    list: bool
    rounds: int
    meet: Path | None
    turn: tuple[int, int]

    def wants(self, case: Case) -> bool:
        wanted = any(part in case.name for part in self.cases) or case.name in self.only
        wanted = wanted or (case.default and not (self.cases or self.only))
        return wanted and not any(part in case.name for part in self.skip)


def parse(arguments: list[str]) -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--skip", nargs="+", default=(), help="leave out cases that contain one of these")
    parser.add_argument("--only", nargs="+", default=(), help="cases by their whole names")
    parser.add_argument("--rounds", type=int, default=0, help="time all cases in turns, so many times")
    add_options(parser)
    parser.add_argument("--out", default="", help="file for the JSON document")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    return parser.parse_args(arguments, namespace=Arguments())


if __name__ == "__main__":
    main()
