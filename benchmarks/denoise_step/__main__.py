"""Milliseconds per denoising step of FLUX.1-dev (random weights) on every number of ranks, beside its peers.

    python -m benchmarks.denoise_step [CASE ...]                            one GPU (or a small model on the CPU)
    torchrun --nproc_per_node 4 -m benchmarks.denoise_step [CASE ...]       four GPUs: 1, 2 and 4 ranks

A case is ``<maker>/<side>/w<ranks>[/<option>...]``, as ``--list`` prints them. An argument picks the cases that contain
it. Without one the few cases of the goals run, and ``--only`` runs those that it names in its order. ``--profile``
prints the kernels of each instead of its times.
The last line is one JSON document. Reports: benchmarks/reports/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.denoise_step.runners import Bench, Step
from benchmarks.kernel_times import print_profile
from benchmarks.models import flux
from benchmarks.step_program import BF16_TFLOPS, FP8_TFLOPS, Result, StepProgram, attempt
from benchmarks.timing import measure, rank_synchronize
from benchmarks.turns import add_options, meeting_of


def floor_ms(case: Case) -> float:
    """Return the time of all arithmetic at an H200's rates, divided over the ranks. Attention is always in bf16."""
    products, attention = flux.flop(case.side, batch=case.batch)
    rate = FP8_TFLOPS if case.precision == "fp8" else BF16_TFLOPS
    return (products / rate + attention / BF16_TFLOPS) / 1e9 / case.num_ranks


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.list:
        named = bool(arguments.cases or arguments.only)
        print("\n".join(case.name for case in CASES if arguments.wants(case) or not named))
        return
    program = StepProgram.begin(arguments.out)
    program.meeting = meeting_of(arguments, program.rank)
    chosen = [case for case in in_order(arguments, CASES) if case.can_run(program.world)]
    bench = Bench(rank=program.rank, world=program.world, small=not torch.cuda.is_available())
    ready, errors = prepare_all(bench, chosen) if program.meeting else ({}, {})
    if program.meeting:
        program.meeting.begin()
    for case in chosen:
        if case in errors:
            result = {"error": errors[case]}
        elif arguments.profile:
            result = attempt(partial(profile_case, bench, case))
        else:
            result = time_case(bench, case, ready.get(case))
        program.add({"case": case.name, **result}, line(case, result, small=bench.small))
    program.end([program.results])


@torch.no_grad()
def prepare_all(bench: Bench, cases: list[Case]) -> tuple[dict[Case, Step], dict[Case, str]]:
    """Return steps that have run twice with the right answer and wait to be timed, and why others do not."""
    ready: dict[Case, Step] = {}
    errors: dict[Case, str] = {}

    def prepare(case: Case) -> Result:
        fitting = bench.fitting(case)
        step, _ = bench.prepare(fitting)
        bench.error(fitting, step())
        step()
        return {"step": step}

    for case in cases:
        result = attempt(partial(prepare, case))
        if "error" in result:
            errors[case] = result["error"]
        else:
            ready[case] = result["step"]
    rank_synchronize()
    return ready, errors


def time_case(bench: Bench, case: Case, step: Step | None = None) -> Result:
    """Return the times of ``case``, or its error. ``step`` is prepared, and its answer is known to be right."""

    @torch.no_grad()
    def run() -> Result:
        if step is None:
            times, extra = bench.run(case)
        else:
            times, extra = measure(step, repeats=bench.fitting(case).repeats, num_ranks=case.num_ranks), {}
        return {**asdict(times), **extra}

    result = attempt(run)
    if "error" in result or bench.small:  # a small model is another one, on a machine of unknown rates
        return result
    floor = floor_ms(case)
    return result | {"floor_ms": round(floor, 2), "share_of_floor": round(floor / result["median_ms"], 3)}


@torch.no_grad()
def profile_case(bench: Bench, case: Case) -> Result:
    case = bench.fitting(case)
    step, close = bench.prepare(case)
    error = bench.error(case, step())
    print_profile(case.name, step, bench.rank)
    close()
    return {"relative_error": error}


def line(case: Case, result: Result, *, small: bool) -> str:
    """Return one result for people."""
    name = f"{'small ' * small}{case.name}"
    if "error" in result:
        return f"{name}: failed\n{result['error']}"
    values = (f"{key} {value:g}" for key, value in result.items() if value is not None)
    return f"{name:58} {'  '.join(values)}"


class Arguments(argparse.Namespace):
    cases: tuple[str, ...]
    skip: tuple[str, ...]
    only: tuple[str, ...]
    out: Path | None
    list: bool
    profile: bool
    meet: Path | None
    turn: tuple[int, int]

    def wants(self, case: Case) -> bool:
        wanted = any(part in case.name for part in self.cases) or case.name in self.only
        wanted = wanted or (case.default and not (self.cases or self.only))
        return wanted and not any(part in case.name for part in self.skip)


def in_order(arguments: Arguments, cases: Iterable[Case]) -> list[Case]:
    """Return those that are wanted: first the names of ``--only``, in its order."""
    places = {name: place for place, name in enumerate(arguments.only)}
    return sorted(filter(arguments.wants, cases), key=lambda case: places.get(case.name, len(places)))


def parse(words: list[str]) -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--skip", nargs="+", default=(), help="leave out cases that contain one of these")
    parser.add_argument("--only", nargs="+", default=(), help="cases by their whole names")
    parser.add_argument("--profile", action="store_true", help="print kernels instead of times")
    add_options(parser)
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    return parser.parse_args(words, namespace=Arguments())


if __name__ == "__main__":
    main()
