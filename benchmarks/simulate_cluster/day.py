"""Traffic of a day: a curve of the load, bursts, and requests of several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.policies.h200 import NUM_STEPS, STEPS
from benchmarks.simulate_cluster.replicas import Picture

DAY_S = 86400.0
PEAKS = ((10.5, 2.2, 0.85), (20.0, 2.6, 1.0))
"""Hour, width in hours and height of each peak, as a share of the highest rate."""
FLOOR = 0.08
"""Lowest rate, at night."""
BURST_FACTOR, BURST_S, BURSTS_A_DAY = 1.5, 600.0, 6
"""Sudden additional traffic, beside the curve."""
MIX = {"512x512": 0.35, "1024x1024": 0.50, "2048x2048": 0.15}
"""Shares of sizes."""
PUBLIC_TRACE = Path(__file__).parent / "traces" / "gentd26.csv"
PARTS_PER_HOUR = 6
"""The public trace has counts of ten minutes."""

Shape = Literal["peaks", "gentd26"]
SHAPES: tuple[Shape, ...] = ("peaks", "gentd26")


@cache
def public_heights() -> tuple[float, ...]:
    """Return the rates of the public trace's parts of an hour, as multiples of its busiest hour's."""
    lines = [line for line in PUBLIC_TRACE.read_text().splitlines() if not line.startswith("#")]
    counts = [int(count) for line in lines for count in line.split(",")[1:]]
    busiest = max(sum(counts[i : i + PARTS_PER_HOUR]) for i in range(0, len(counts), PARTS_PER_HOUR))
    return tuple(PARTS_PER_HOUR * count / busiest for count in counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class DayTraffic:
    """Poisson arrivals whose rate follows a curve from ``from_hour`` for ``hours``.

    The curve ``peaks`` has two peaks a day, and bursts are added. ``gentd26`` is a public trace of four days, which has
    its own bursts. Both repeat.
    """

    peak_load: float
    """Gangs that the busiest hour of the curve keeps busy, added bursts aside."""
    num_ranks: int
    """Ranks of a gang."""
    from_hour: float = 0.0
    hours: float = 24.0
    seed: int = 1
    shape: Shape = "peaks"

    @property
    def lone_s(self) -> Mapping[str, float]:
        """Seconds of a picture alone, by size."""
        return {size: NUM_STEPS * STEPS[size][self.num_ranks] for size in MIX}

    @property
    def mean_s(self) -> float:
        return sum(share * self.lone_s[size] for size, share in MIX.items())

    def load_at(self, at_s: float) -> float:
        """Return the curve's load at this time from the start, added bursts aside."""
        hour = self.from_hour + at_s / 3600
        if self.shape == "gentd26":
            heights = public_heights()
            return self.peak_load * heights[int(PARTS_PER_HOUR * hour) % len(heights)]
        hour %= 24
        height = max(
            top * math.exp(-((min(abs(hour - peak), 24 - abs(hour - peak)) / width) ** 2) / 2)
            for peak, width, top in PEAKS
        )
        return self.peak_load * (FLOOR + (1 - FLOOR) * height)

    def arrivals(self) -> Iterator[Picture]:
        """Yield pictures in order of time. Equal seeds give equal traffic."""
        random, end_s, at_s = Random(self.seed), 3600 * self.hours, 0.0
        num_bursts = round(BURSTS_A_DAY * self.hours / 24) if self.shape == "peaks" else 0
        bursts = sorted(random.uniform(0, end_s) for _ in range(num_bursts))
        highest = self.peak_load * (max(public_heights()) if self.shape == "gentd26" else BURST_FACTOR) / self.mean_s
        sizes, shares = list(MIX), list(MIX.values())
        while (at_s := at_s + random.expovariate(highest)) < end_s:
            in_burst = any(begin_s <= at_s < begin_s + BURST_S for begin_s in bursts)
            rate = self.load_at(at_s) / self.mean_s * (BURST_FACTOR if in_burst else 1.0)
            if random.random() * highest < rate:
                (size,) = random.choices(sizes, shares)
                yield Picture(at_s, size)
