"""What a machine can do, as numbers (``measure.py`` takes them): products, attention, memory, exchanges."""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass, field, replace

Rates = tuple[tuple[int, float], ...]
"""(tokens, FLOP/s), at growing sizes."""


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
    """``exchanges`` go by "kind/ranks"; ``quantised`` are rates of products in other precisions, by their name.

    ``memory_bytes`` is what one rank has to itself. ``fast_path``: engines run a family's hand-ordered step there.
    ``source``: the document that figures are published in; empty if they were measured.
    """

    name: str
    products: Rates
    attention: Rates
    copy_bytes_per_s: float
    memory_bytes: int
    exchanges: dict[str, Line]
    quantised: dict[str, Rates] = field(default_factory=dict)
    fast_path: bool = False
    source: str = ""

    def product_s(self, flops: float, rows: float, precision: str = "native") -> float:
        """``ValueError`` if no rate in that precision is known."""
        if precision == "native":
            return flops / between(self.products, rows)
        if precision not in self.quantised:
            known = ", ".join(["native", *self.quantised])
            raise ValueError(f"no rate in precision {precision} is known of {self.name}; known: {known}")
        return flops / between(self.quantised[precision], rows)

    def attention_s(self, flops: float, tokens: float) -> float:
        return flops / between(self.attention, tokens)

    def exchange_s(self, kind: str, num_ranks: int, size_bytes: float) -> float:
        """0 on one rank. ``ValueError`` if the machine was not measured with that many."""
        if num_ranks == 1:
            return 0.0
        line = self.exchanges.get(f"{kind}/{num_ranks}")
        if line is None:
            known = ", ".join(self.exchanges)
            raise ValueError(f"{self.name} was not measured with {kind} over {num_ranks} ranks; measured: {known}")
        return line.time_s(size_bytes)

    def for_ranks(self, num_ranks: int) -> Machine:
        """Return this machine with exchanges over each number of ranks that divides ``num_ranks``.

        Those that were not measured have the latency of the nearest number of ranks, and its speed for the bytes that
        leave a rank.
        """
        sizes = [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]
        added = {
            f"{kind}/{size}": self._like_nearest(kind, size)
            for kind in dict.fromkeys(key.partition("/")[0] for key in self.exchanges)
            for size in sizes
            if f"{kind}/{size}" not in self.exchanges
        }
        return replace(self, exchanges=self.exchanges | added)

    def _like_nearest(self, kind: str, num_ranks: int) -> Line:
        measured = {int(key.partition("/")[2]): line for key, line in self.exchanges.items() if key.startswith(kind)}
        nearest = min(measured, key=lambda size: (abs(size - num_ranks), -size))
        speed = measured[nearest].bytes_per_s * sent_share(kind, nearest) / sent_share(kind, num_ranks)
        return Line(latency_s=measured[nearest].latency_s, bytes_per_s=speed)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        given = json.loads(text)
        given["exchanges"] = {key: Line(**line) for key, line in given["exchanges"].items()}
        given["quantised"] = {name: _rates(table) for name, table in given.get("quantised", {}).items()}
        return cls(**given | {name: _rates(given[name]) for name in ("products", "attention")})

    def describe(self) -> str:
        """The figures for people, a line each."""
        tables = {"products": self.products, "attention": self.attention}
        tables |= {f"products, {name}": table for name, table in self.quantised.items()}
        lines = [f"{self.name}: {self.memory_bytes / 2**30:.1f} GiB a rank, copies {_si(self.copy_bytes_per_s)}B/s"]
        for name, table in tables.items():
            lines.append(f"  {name}: " + ", ".join(f"{_si(rate)}FLOP/s at {size}" for size, rate in table))
        for name, line in self.exchanges.items():
            lines.append(f"  {name}: {1e6 * line.latency_s:.1f} us + {_si(line.bytes_per_s)}B/s")
        if self.source:
            lines.append(f"  published in: {self.source}; as much of it is reached as an H200 was measured to")
        return "\n".join(lines)


def sent_share(kind: str, num_ranks: int) -> float:
    """Bytes that leave a rank, as a multiple of those that an exchange counts."""
    match kind:
        case "all_to_all":
            return (num_ranks - 1) / num_ranks
        case "all_gather":
            return num_ranks - 1
        case "all_reduce":
            return 2 * (num_ranks - 1) / num_ranks
    return 1.0


def _rates(table: list[list[float]]) -> Rates:
    return tuple((int(size), float(rate)) for size, rate in table)


def _si(value: float) -> str:
    """Three digits and a prefix: 7.5e14 is "750 T"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value / 1e3:.3g} k"


def between(table: Rates, size: float) -> float:
    """The rate at ``size``, linear between measured sizes and constant outside them."""
    sizes = [entry[0] for entry in table]
    at = bisect.bisect_left(sizes, size)
    if at in (0, len(table)):
        return table[min(at, len(table) - 1)][1]
    (low, low_rate), (high, high_rate) = table[at - 1], table[at]
    return low_rate + (high_rate - low_rate) * (size - low) / (high - low)
