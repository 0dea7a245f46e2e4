"""Times of repeated calls, by device events on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

SAMPLE_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds of a repeat on the slowest rank of its team, over all repeats and teams."""

    median_ms: float
    lowest_ms: float
    p90_ms: float
    num_repeats: int
    """Repeats of each team."""
    clock_mhz: int | None = None
    """Mean of the devices while the repeats ran, if known. A GPU at its power limit lowers its clock."""
    power_w: int | None = None

    @classmethod
    def of(
        cls,
        values_ms: Sequence[float],
        num_repeats: int | None = None,
        clock_mhz: int | None = None,
        power_w: int | None = None,
    ) -> Times:
        """Return the times of ``values_ms``. By default each value is one repeat."""
        ordered = sorted(values_ms)
        return cls(
            median_ms=statistics.median(ordered),
            lowest_ms=ordered[0],
            p90_ms=ordered[math.ceil(0.9 * len(ordered)) - 1],
            num_repeats=len(ordered) if num_repeats is None else num_repeats,
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


def measure(
    call: Callable[[], object],
    *,
    repeats: int = 20,
    warm_up: int = 3,
    num_ranks: int | None = None,
    heat_s: float = 0.0,
) -> Times:
    """Repeat ``call`` on all ranks at once. A repeat's time is the time between two events around it.

    Every ``num_ranks`` ranks (None: all) are a team, whose repeat takes as long as on its slowest rank. The repeats of
    all teams count. Before them devices work for ``heat_s``: at its power limit a GPU that has rested is faster than
    one at work, by more than makers of long steps differ.
    """
    for _ in range(warm_up):
        call()
    rank_synchronize()
    if heat_s > 0:
        _heat(call, heat_s)
    samples = _Samples([], [])
    times = _cuda_times(call, repeats, samples) if torch.cuda.is_available() else _cpu_times(call, repeats)
    clock_mhz, power_w = _mean_of_ranks(samples.clocks_mhz), _mean_of_ranks(samples.powers_w)
    return Times.of(_times_of_teams(times, num_ranks), repeats, clock_mhz, power_w)


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


def _times_of_teams(times: list[float], num_ranks: int | None) -> list[float]:
    return [max(repeat) for team in _teams(_of_all_ranks(times), num_ranks) for repeat in zip(*team, strict=True)]


def _teams(ranks: list[list[float]], num_ranks: int | None) -> list[list[list[float]]]:
    each = num_ranks or len(ranks)
    return [ranks[first : first + each] for first in range(0, len(ranks), each)]


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
