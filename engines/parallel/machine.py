"""What a machine can do, as numbers (``measure.py`` takes them): products, attention, memory, exchanges."""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Time as latency plus size over speed."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Line:
        """The line through two measurements (bytes, seconds); noise cannot make it slope down or start below zero."""
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 1e-15)
        return cls(latency_s=max(small[1] - small[0] * slope, 0.0), bytes_per_s=1 / slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """``products`` and ``attention`` are (tokens, FLOP/s), measured at growing sizes; ``exchanges`` by "kind/ranks"."""

    name: str
    products: tuple[tuple[int, float], ...]
    attention: tuple[tuple[int, float], ...]
    copy_bytes_per_s: float
    memory_bytes: int
    exchanges: dict[str, Line]

    def product_s(self, flops: float, rows: float) -> float:
        return flops / between(self.products, rows)

    def attention_s(self, flops: float, tokens: float) -> float:
        return flops / between(self.attention, tokens)

    def exchange_s(self, kind: str, num_ranks: int, size_bytes: float) -> float:
        """0 on one rank. ``ValueError`` if the machine was not measured with that many."""
        if num_ranks == 1:
            return 0.0
        line = self.exchanges.get(f"{kind}/{num_ranks}")
        if line is None:
            raise ValueError(f"{self.name} was not measured with {kind} over {num_ranks} ranks: {list(self.exchanges)}")
        return line.time_s(size_bytes)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        given = json.loads(text)
        given["exchanges"] = {key: Line(**line) for key, line in given["exchanges"].items()}
        for table in ("products", "attention"):
            given[table] = tuple((int(size), float(rate)) for size, rate in given[table])
        return cls(**given)


def between(table: tuple[tuple[int, float], ...], size: float) -> float:
    """The rate at ``size``, linear between measured sizes and constant outside them."""
    sizes = [entry[0] for entry in table]
    at = bisect.bisect_left(sizes, size)
    if at in (0, len(table)):
        return table[min(at, len(table) - 1)][1]
    (low, low_rate), (high, high_rate) = table[at - 1], table[at]
    return low_rate + (high_rate - low_rate) * (size - low) / (high - low)
