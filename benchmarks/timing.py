"""Times of repeated calls, by device events where there is a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds over all repeats, of the slowest rank."""

    median_ms: float
    lowest_ms: float
    p90_ms: float
    num_repeats: int


def measure(call: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> Times:
    """``call`` again and again, all ranks at once; a repeat's time is the time between two events round it."""
    for _ in range(warm_up):
        call()
    rank_synchronize()
    times = _cuda_times(call, repeats) if torch.cuda.is_available() else _cpu_times(call, repeats)
    times = sorted(_slowest_rank(times))
    return Times(
        median_ms=statistics.median(times),
        lowest_ms=times[0],
        p90_ms=times[int(0.9 * (len(times) - 1))],
        num_repeats=repeats,
    )


def rank_synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def _cuda_times(call: Callable[[], object], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


def _cpu_times(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - start_s) * 1000)
    return times


def _slowest_rank(times: list[float]) -> list[float]:
    if not dist.is_initialized():
        return times
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(time_ms) for time_ms in slowest]
