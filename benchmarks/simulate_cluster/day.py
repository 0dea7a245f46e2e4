"""Traffic of a day: two peaks, bursts, and requests of several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.policies.h200 import NUM_STEPS, STEPS
from benchmarks.simulate_cluster.cluster import Picture

DAY_S = 86400.0
PEAKS = ((10.5, 2.2, 0.85), (20.0, 2.6, 1.0))
"""Hour, width in hours and height of each peak, as a share of the highest rate."""
FLOOR = 0.08
"""Lowest rate, at night."""
BURST_FACTOR, BURST_S, BURSTS_A_DAY = 1.5, 600.0, 6
"""Sudden additional traffic, beside the curve."""
MIX = {"512x512": 0.35, "1024x1024": 0.50, "2048x2048": 0.15}
"""Shares of sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DayTraffic:
    """Poisson arrivals whose rate follows a day's curve from ``from_hour`` for ``hours``."""

    peak_load: float
    """Gangs that the highest point of the curve keeps busy, bursts aside."""
    num_ranks: int
    """Ranks of a gang."""
    from_hour: float = 0.0
    hours: float = 24.0
    seed: int = 1

    @property
    def lone_s(self) -> Mapping[str, float]:
        """Seconds of a picture alone, by size."""
        return {size: NUM_STEPS * STEPS[size][self.num_ranks] for size in MIX}

    @property
    def mean_s(self) -> float:
        return sum(share * self.lone_s[size] for size, share in MIX.items())

    def load_at(self, at_s: float) -> float:
        """Return the curve's load at this time from the start, bursts aside."""
        hour = (self.from_hour + at_s / 3600) % 24
        height = max(
            top * math.exp(-((min(abs(hour - peak), 24 - abs(hour - peak)) / width) ** 2) / 2)
            for peak, width, top in PEAKS
        )
        return self.peak_load * (FLOOR + (1 - FLOOR) * height)

    def arrivals(self) -> Iterator[Picture]:
        """Yield pictures in order of time. Equal seeds give equal traffic."""
        random, lone_s, end_s, at_s = Random(self.seed), self.lone_s, 3600 * self.hours, 0.0
        num_bursts = round(BURSTS_A_DAY * self.hours / 24)
        bursts = sorted(random.uniform(0, end_s) for _ in range(num_bursts))
        highest = self.peak_load * BURST_FACTOR / self.mean_s
        sizes, shares = list(MIX), list(MIX.values())
        while (at_s := at_s + random.expovariate(highest)) < end_s:
            in_burst = any(begin_s <= at_s < begin_s + BURST_S for begin_s in bursts)
            rate = self.load_at(at_s) / self.mean_s * (BURST_FACTOR if in_burst else 1.0)
            if random.random() * highest < rate:
                (size,) = random.choices(sizes, shares)
                yield Picture(at_s, size, lone_s[size])
