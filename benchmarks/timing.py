"""Times of repeated calls on all ranks, by device events on a GPU, and what measured steps are compared with."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.tensors import relative_difference

BF16_TFLOPS = 790.0
"""Rate of an H200 in a large bf16 product on random data."""
SAMPLE_S = 0.05


def start_distributed() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. A single rank needs no process group."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and torch.cuda.is_available():
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", pg_options=options, device_id=torch.device("cuda", rank))
    elif world > 1:
        dist.init_process_group("gloo")
    return rank, world


def relative_error(given: Tensor, expected: Tensor, allowed: float | None = None) -> float:
    """Return the error with three digits. AssertionError unless it is below ``allowed``."""
    error = relative_difference(given, expected)
    assert allowed is None or error < allowed, f"wrong answer: relative error {error:.3f}"
    return float(f"{error:.2e}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds of a repeat on the slowest rank."""

    median_ms: float
    lowest_ms: float
    p90_ms: float
    num_repeats: int
    clock_mhz: int | None = None
    """Mean of the devices while the repeats ran, if known. A GPU at its power limit lowers its clock."""
    power_w: int | None = None

    @classmethod
    def of(cls, values_ms: Sequence[float], clock_mhz: int | None = None, power_w: int | None = None) -> Times:
        ordered = sorted(values_ms)
        return cls(
            median_ms=statistics.median(ordered),
            lowest_ms=ordered[0],
            p90_ms=ordered[math.ceil(0.9 * len(ordered)) - 1],
            num_repeats=len(ordered),
            clock_mhz=clock_mhz,
            power_w=power_w,
        )


@dataclass(slots=True)
class _Samples:
    """Samples of this process's device while it works."""

    clocks_mhz: list[float]
    powers_w: list[float]

    def take(self) -> None:
        try:
            self.clocks_mhz.append(float(torch.cuda.clock_rate()))
            self.powers_w.append(torch.cuda.power_draw() / 1000)
        except Exception:  # NVML's own, or that of its absence
            return


def measure(call: Callable[[], object], *, repeats: int = 20, warm_up: int = 3, heat_s: float = 0.0) -> Times:
    """Repeat ``call`` on all ranks at once. A repeat's time is the time between two events around it.

    A repeat takes as long as on the slowest rank. Before the repeats devices work for ``heat_s``: at its power limit a
    GPU that has rested is faster than one at work, by more than makers of long steps differ.
    """
    for _ in range(warm_up):
        call()
    rank_synchronize()
    if heat_s > 0:
        _heat(call, heat_s)
    samples = _Samples([], [])
    times = _cuda_times(call, repeats, samples) if torch.cuda.is_available() else _cpu_times(call, repeats)
    slowest = [max(repeat) for repeat in zip(*_of_all_ranks(times), strict=True)]
    return Times.of(slowest, _mean_of_ranks(samples.clocks_mhz), _mean_of_ranks(samples.powers_w))


def _heat(call: Callable[[], object], heat_s: float) -> None:
    """Call as often as fills the time on the slowest rank: every rank must make the same number of calls."""
    start_s = time.perf_counter()
    call()
    rank_synchronize()
    longest_s = max(taken_s for (taken_s,) in _of_all_ranks([time.perf_counter() - start_s]))
    for _ in range(math.ceil(heat_s / longest_s) - 1):
        call()
    rank_synchronize()


def rank_synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def _cuda_times(call: Callable[[], object], repeats: int, samples: _Samples) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    while not marks[-1].query():  # type: ignore[no-untyped-call]
        samples.take()
        time.sleep(SAMPLE_S)
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


def _cpu_times(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - start_s) * 1000)
    return times


def _mean_of_ranks(values: list[float]) -> int | None:
    """Return the mean of the ranks' means; None if a rank has none."""
    means = [mean for (mean,) in _of_all_ranks([statistics.mean(values) if values else -1.0])]
    return None if min(means) < 0 else round(statistics.mean(means))


def _of_all_ranks(values: list[float]) -> list[list[float]]:
    if not dist.is_initialized():
        return [values]
    mine = torch.tensor(values, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [[float(value) for value in some] for some in everyone]


def highest_bytes(device: torch.device, *, anew: bool = False) -> int:
    """Return the most bytes of tensors so far; 0 on a CPU. ``anew``: those of now, from which later calls count."""
    if device.type != "cuda":
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
