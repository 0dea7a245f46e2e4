"""Kernels of a step: how long each takes, and how their kinds share the step's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import rank_synchronize

NUM_ROWS = 18
NUM_STEPS = 3
KINDS = {
    "exchange": ("nccl", "_push", "barrier"),
    "attention": ("sdpa", "flash"),
    "GEMMs": ("nvjet", "gemm", "cutlass", "splitK"),
    "copies": ("Memcpy",),
}
"""Parts of kernels' names by kind. Every other kernel is a pass over activations."""
Spans = list[tuple[float, float]]


def print_profile(name: str, step: Callable[[], object], rank: int) -> None:
    """Profile some runs of ``step`` on all ranks. Captured steps are replayed, so what overlaps is seen to overlap."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        rank_synchronize()
    if rank == 0:
        _print(name, profiler)


def _print(name: str, profiler: Any) -> None:
    kernels = [
        event for event in profiler.events() if event.device_type.name == "CUDA" and event.time_range.elapsed_us()
    ]
    print(f"\n{name}: {split_of_time(kernels) if kernels else 'no kernels'}")
    totals = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in totals[:NUM_ROWS]:
        total_ms, each_us = event.self_device_time_total / 1000 / NUM_STEPS, event.self_device_time_total / event.count
        print(f"{total_ms:9.2f} ms {event.count / NUM_STEPS:6.0f} x {each_us:8.1f} us  {event.key[:110]}", flush=True)


def split_of_time(kernels: Iterable[Any]) -> str:
    """Return milliseconds a step: from first to last kernel, by kind, idle, and exchange that nothing overlaps."""
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
    """Return the length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
