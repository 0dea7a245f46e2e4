"""Where a step's time goes, kernel by kernel, and how far its answer is from float32.

    python -m benchmarks.denoise_step.profile [CASE ...]
    torchrun --nproc_per_node 4 -m benchmarks.denoise_step.profile [CASE ...]

A case is the whole name of one of ``benchmarks.denoise_step --list``. Captured cases are profiled as they are replayed,
so what runs side by side is seen side by side; rank 0 prints.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.denoise_step.runners import Bench
from benchmarks.distributed import start_distributed
from benchmarks.timing import rank_synchronize

NUM_ROWS = 18
SIDE = 1024
NUM_STEPS = 3
KINDS = {
    "exchange": ("nccl", "_push", "barrier"),
    "attention": ("sdpa", "flash"),
    "GEMMs": ("nvjet", "gemm", "cutlass", "splitK"),
    "copies": ("Memcpy",),
}
"""By parts of a kernel's name; everything else is a pass over activations."""
Spans = list[tuple[float, float]]


@torch.no_grad()
def main() -> None:
    rank, world = start_distributed()
    bench = Bench(rank=rank, world=world, small=not torch.cuda.is_available())
    if world == 1:
        accuracy(bench, 256 if bench.small else SIDE)
    failed = 0
    for name in sys.argv[1:]:
        (case,) = (case for case in CASES if case.name == name)
        try:
            profiler = profiled(bench, case)
        except Exception:
            print(f"rank {rank}, {name}: failed\n{traceback.format_exc()[-1500:]}", flush=True)
            failed = 1
            continue
        if rank == 0:
            show(name, profiler)
    rank_synchronize()
    sys.stdout.flush()
    os._exit(failed)  # graphs hold the communicator: an orderly shutdown would wait for them


def profiled(bench: Bench, case: Case) -> Any:
    step, close = bench.prepare(case if bench.pool else dataclasses.replace(case, graph=False))
    step()
    rank_synchronize()
    with profile(activities=[ProfilerActivity.CUDA if bench.pool else ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        rank_synchronize()
    close()
    return profiler


def show(name: str, profiler: Any) -> None:
    kernels = [
        event for event in profiler.events() if event.device_type.name == "CUDA" and event.time_range.elapsed_us()
    ]
    print(f"\n{name}: {split_of_time(kernels) if kernels else 'no kernels'}")
    totals = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in totals[:NUM_ROWS]:
        total_ms, each_us = event.self_device_time_total / 1000 / NUM_STEPS, event.self_device_time_total / event.count
        print(f"{total_ms:9.2f} ms {event.count / NUM_STEPS:6.0f} x {each_us:8.1f} us  {event.key[:110]}", flush=True)


def split_of_time(kernels: Iterable[Any]) -> str:
    """Milliseconds a step: from first to last kernel, by kind, nothing running, and exchange with nothing beside it."""
    spans: dict[str, Spans] = defaultdict(list)
    for event in kernels:
        spans[kind_of(event.name)].append((event.time_range.start, event.time_range.end))
    everything = [span for some in spans.values() for span in some]
    others = [span for kind, some in spans.items() if kind not in ("exchange", "copies") for span in some]
    total_us = max(end for _, end in everything) - min(start for start, _ in everything)
    lines = {kind: sum(end - start for start, end in some) for kind, some in spans.items()}
    lines |= {"exchange alone": covered(everything) - covered(others), "idle": total_us - covered(everything)}
    parts = ", ".join(f"{kind} {time_us / 1000 / NUM_STEPS:.2f}" for kind, time_us in lines.items())
    return f"{total_us / 1000 / NUM_STEPS:.2f} ms: {parts}"


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "passes")


def covered(spans: Spans) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def accuracy(bench: Bench, side: int) -> None:
    """Relative errors against the module in float32."""
    inputs = bench.inputs(side, 1)
    answers = {"module": bench.reference(side, 1)}
    for precision in ("native", "fp8"):
        case = next(case for case in CASES if (case.num_ranks, case.side, case.precision) == (1, SIDE, precision))
        step, _ = bench.prepare(dataclasses.replace(case, graph=False, side=side))
        answers[f"fast, {precision}"] = step().float()
    exact = float32_answer(bench.module, inputs)
    for name, answer in answers.items():
        print(f"{name:14} relative error against float32 {((answer - exact).norm() / exact.norm()).item():.3e}")


def float32_answer(module: Any, inputs: dict[str, Tensor]) -> Tensor:
    exact = copy.deepcopy(module).float()
    exact.set_attention_backend("native")
    wide = {name: tensor.float() for name, tensor in inputs.items()}
    answer: Tensor = exact(**wide, return_dict=False)[0]
    return answer


if __name__ == "__main__":
    main()
