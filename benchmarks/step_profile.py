"""Where a step's time goes on one GPU, kernel by kernel, and how far its answer is from float32.

    python -m benchmarks.step_profile [CASE ...]

A case is one of ``benchmarks.denoise_step --list`` that one GPU can run (widths above 1: those without exchange).
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES
from benchmarks.runners import Bench

NUM_ROWS = 22
SIDE = 1024


@torch.no_grad()
def main() -> None:
    bench = Bench(rank=0, world=1, small=not torch.cuda.is_available(), say=print)
    accuracy(bench, 256 if bench.small else SIDE)
    for name in sys.argv[1:]:
        (case,) = (case for case in CASES if case.name == name)
        step, _ = bench.prepare(dataclasses.replace(case, graph=False))
        step()
        with profile(activities=[ProfilerActivity.CUDA if bench.pool else ProfilerActivity.CPU]) as profiler:
            step()
            if bench.pool:
                torch.cuda.synchronize()
        show(name, profiler)


def show(name: str, profiler: Any) -> None:
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total_us = sum(event.self_device_time_total for event in kernels)
    print(f"\n{name}: {total_us / 1000:.2f} ms of kernels")
    for event in kernels[:NUM_ROWS]:
        each_us = event.self_device_time_total / event.count
        print(f"{event.self_device_time_total / 1000:9.2f} ms {event.count:5} x {each_us:8.1f} us  {event.key[:110]}")


def accuracy(bench: Bench, side: int) -> None:
    """Relative errors against the module in float32."""
    inputs = bench.inputs(side, 1)
    answers = {"module": bench.reference(side, 1)}
    for precision in ("native", "fp8"):
        case = next(case for case in CASES if (case.width, case.side, case.precision) == (1, SIDE, precision))
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
