"""A machine's throughput, bandwidth and latencies: measured here, or published figures by name."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

HOST_BANDWIDTH = 47e9
"""Bytes per second from pinned host memory: 38 GiB took 0.86 s on an H100 (PCIe 5.0, 16 lanes)."""

Rates = tuple[tuple[int, float], ...]
"""(tokens, FLOP/s), in ascending order of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Time as a fixed latency plus size divided by speed."""

    latency_s: float
    """Time of an empty exchange."""
    bytes_per_s: float
    """Slope, for the size that the exchange's caller counts."""

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Line:
        """Return the line through two measurements (bytes, seconds), with slope and latency bounded against noise."""
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 1e-15)
        return cls(latency_s=max(small[1] - small[0] * slope, 0.0), bytes_per_s=1 / slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Figures of one rank's device and of the exchanges between ranks."""

    name: str
    """The device's model, or "cpu" with its threads."""
    products: Rates
    """Pairs of rows and FLOP/s of linears in the model's own dtype."""
    attention: Rates
    """Pairs of tokens and FLOP/s of attention."""
    copy_bytes_per_s: float
    """Speed of a copy within the device: bytes read and bytes written."""
    memory_bytes: int
    """Memory of one rank."""
    exchanges: dict[str, Line]
    """Lines by "kind/ranks", such as "all_to_all/2"."""
    quantised: dict[str, Rates] = field(default_factory=dict)
    """Rates of products in other precisions, by name."""
    attention_precision: str = "auto"
    """Precision of the attention that was timed (``engines.core.spec.ATTENTIONS``)."""
    fast_path: bool = False
    """True if engines run a family's hand-ordered step there."""
    host_bytes_per_s: float = HOST_BANDWIDTH
    """Speed of copies from pinned host memory; of a measured machine, an H100's."""
    source: str = ""
    """Document of published figures; empty if measured."""

    def product_s(self, flops: float, rows: float, precision: str = "native") -> float:
        """Return the seconds of a product. ``ValueError`` if there is no rate for the precision."""
        if precision == "native":
            return flops / between(self.products, rows)
        if precision not in self.quantised:
            known = ", ".join(["native", *self.quantised])
            raise ValueError(f"no rate in precision {precision} is known of {self.name}; known: {known}")
        return flops / between(self.quantised[precision], rows)

    def attention_s(self, flops: float, tokens: float) -> float:
        return flops / between(self.attention, tokens)

    def exchange_s(self, kind: str, num_ranks: int, size_bytes: float) -> float:
        """Return the seconds of an exchange; 0 on one rank. ``ValueError`` if that number of ranks was not measured."""
        if num_ranks == 1:
            return 0.0
        line = self.exchanges.get(f"{kind}/{num_ranks}")
        if line is None:
            known = ", ".join(self.exchanges)
            raise ValueError(f"{self.name} was not measured with {kind} over {num_ranks} ranks; measured: {known}")
        return line.time_s(size_bytes)

    def for_ranks(self, num_ranks: int) -> Machine:
        """Return this machine with exchanges over each number of ranks that divides ``num_ranks``.

        Unmeasured numbers get the latency of the nearest measured one, and its speed for the bytes that leave a rank.
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
        document = json.loads(text)
        document["exchanges"] = {key: Line(**line) for key, line in document["exchanges"].items()}
        document["quantised"] = {name: _rates(table) for name, table in document.get("quantised", {}).items()}
        return cls(**document | {name: _rates(document[name]) for name in ("products", "attention")})

    def describe(self) -> str:
        """Return the figures for people, a line each."""
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
    """Return the bytes that leave a rank, as a multiple of the exchange's size."""
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
    """Return three digits and a prefix: 7.5e14 is "750 T"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value / 1e3:.3g} k"


def between(table: Rates, size: float) -> float:
    """Return the rate at ``size``, linear between measured sizes and constant outside them."""
    sizes = [entry[0] for entry in table]
    at = bisect.bisect_left(sizes, size)
    if at in (0, len(table)):
        return table[min(at, len(table) - 1)][1]
    (low, low_rate), (high, high_rate) = table[at - 1], table[at]
    return low_rate + (high_rate - low_rate) * (size - low) / (high - low)


_EXCHANGES = {
    "all_to_all/2": Line(latency_s=21e-6, bytes_per_s=5.7e11),
    "all_to_all/4": Line(latency_s=12e-6, bytes_per_s=3.2e11),
    "all_gather/2": Line(latency_s=15e-6, bytes_per_s=2.4e11),
    "all_gather/4": Line(latency_s=18e-6, bytes_per_s=9.8e10),
    "all_reduce/2": Line(latency_s=15e-6, bytes_per_s=2.1e11),
    "all_reduce/4": Line(latency_s=18e-6, bytes_per_s=1.9e11),
    "rotation/2": Line(latency_s=15e-6, bytes_per_s=2.3e11),
    "rotation/4": Line(latency_s=18e-6, bytes_per_s=1.75e11),
}
"""NCCL 2.28. Speeds are measured by the engine at start, latencies inside a captured step: 15 to 20 us below calls
from Python. Latencies of all-reduce and rotation are those of all-gather."""

H200 = Machine(
    name="H200 with NVLink, measured",
    products=((128, 3.6e14), (1024, 6.8e14), (1152, 6.4e14), (2304, 6.4e14), (4608, 6.7e14)),
    attention=((512, 3.0e14), (1536, 4.5e14), (4608, 5.6e14), (16896, 6.0e14)),
    copy_bytes_per_s=3.5e12,
    memory_bytes=139 * 2**30,
    exchanges=_EXCHANGES,
    quantised={
        "fp8": ((128, 3.0e14), (1024, 1.0e15), (1152, 1.05e15), (4608, 1.2e15)),
        "int8": ((512, 4.9e14), (1152, 5.9e14), (2304, 6.6e14), (4608, 7.0e14)),
    },
    fast_path=True,
)
"""Measured at the clock of a GPU under sustained load; a cool one is 10 to 20 % faster
(benchmarks/reports/denoise_step_h200_2026-11-21.md): bf16 products of 3072 and 12288 features in a step's mix, and
attention of 128-wide heads. float8 includes its quantisation. int8 products alone are no faster than bf16's."""

TERA, GIGA = 1e12, 1e9
NVLINK, PCIE = "NVLink", "PCIe"
PCIE_4, PCIE_5 = 32 * GIGA, 64 * GIGA
"""Bytes per second of 16 lanes, per direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFigures:
    """Published figures of a GPU. Rates are dense FLOP/s, without sparsity; 0: the GPU has no such product."""

    name: str
    """Short name of the model, such as "H200"."""
    source: str
    """The document."""
    bf16: float
    """Rate of products accumulated in float32."""
    fp8: float
    """Rate of products accumulated in float32."""
    int8: float
    """Rate of products accumulated in int32."""
    memory_bytes_per_s: float
    """Bandwidth of its memory."""
    memory_gib: float
    """GiB, less the part that error correction takes if it has no memory of its own."""
    link: str
    """Link between two GPUs of a host: "NVLink" or "PCIe"."""
    link_bytes_per_s: float
    """Between two GPUs of a host, per direction."""
    host_bytes_per_s: float = PCIE_5
    """Rate from the host's memory."""


_H200 = PublishedFigures(
    name="H200",
    source="NVIDIA H200 data sheet",
    bf16=989 * TERA,
    fp8=1979 * TERA,
    int8=1979 * TERA,
    memory_bytes_per_s=4.8 * TERA,
    memory_gib=141,
    link=NVLINK,
    link_bytes_per_s=450 * GIGA,
)


def from_published(figures: PublishedFigures) -> Machine:
    """Return the machine that reaches the same share of its published figures as ``H200`` does.

    Latencies of exchanges are those of ``H200``.
    """

    def scaled(rates: Rates, own: float, reference: float) -> Rates:
        return tuple((size, rate * own / reference) for size, rate in rates)

    own = {"fp8": (figures.fp8, _H200.fp8), "int8": (figures.int8, _H200.int8)}
    link = figures.link_bytes_per_s / _H200.link_bytes_per_s
    copies = figures.memory_bytes_per_s / _H200.memory_bytes_per_s
    return Machine(
        name=f"{figures.name} with {figures.link}, published, not measured",
        source=figures.source,
        products=scaled(H200.products, figures.bf16, _H200.bf16),
        attention=scaled(H200.attention, figures.bf16, _H200.bf16),
        copy_bytes_per_s=H200.copy_bytes_per_s * copies,
        memory_bytes=int(H200.memory_bytes * figures.memory_gib / _H200.memory_gib),
        exchanges={
            key: Line(latency_s=line.latency_s, bytes_per_s=line.bytes_per_s * link)
            for key, line in H200.exchanges.items()
        },
        quantised={name: scaled(H200.quantised[name], *rates) for name, rates in own.items() if rates[0]},
        fast_path=True,
        host_bytes_per_s=HOST_BANDWIDTH * figures.host_bytes_per_s / _H200.host_bytes_per_s,
    )


def _figures(
    name: str,
    source: str,
    tera_flop: tuple[float, float, float],
    memory: tuple[float, float],
    link: tuple[str, float],
    host_bytes_per_s: float = PCIE_4,
) -> PublishedFigures:
    """Convert ``tera_flop`` of bf16, fp8 and int8, ``memory`` in GiB and GB/s, and ``link`` in GB/s per direction."""
    bf16, fp8, int8 = (TERA * rate for rate in tera_flop)
    return PublishedFigures(
        name=name,
        source=source,
        bf16=bf16,
        fp8=fp8,
        int8=int8,
        memory_gib=memory[0],
        memory_bytes_per_s=memory[1] * GIGA,
        link=link[0],
        link_bytes_per_s=link[1] * GIGA,
        host_bytes_per_s=host_bytes_per_s,
    )


ADA, BLACKWELL = "NVIDIA Ada GPU architecture white paper", "NVIDIA RTX Blackwell GPU architecture white paper"
A100, H100 = "NVIDIA A100 data sheet", "NVIDIA H100 data sheet"
PUBLISHED: Mapping[str, PublishedFigures] = {
    "b200": _figures("B200", "NVIDIA DGX B200 data sheet", (2250, 4500, 4500), (180, 8000), (NVLINK, 900), PCIE_5),
    "h100": _figures("H100 SXM", H100, (989, 1979, 1979), (80, 3350), (NVLINK, 450), PCIE_5),
    "h100-pcie": _figures("H100 PCIe", H100, (756, 1513, 1513), (80, 2000), (PCIE, 64), PCIE_5),
    "a100": _figures("A100 80 GB SXM", A100, (312, 0, 624), (80, 2039), (NVLINK, 300)),
    "a100-40gb": _figures("A100 40 GB SXM", A100, (312, 0, 624), (40, 1555), (NVLINK, 300)),
    "a100-pcie": _figures("A100 80 GB PCIe", A100, (312, 0, 624), (80, 1935), (PCIE, 32)),
    "l40s": _figures("L40S", "NVIDIA L40S data sheet", (362, 733, 733), (45, 864), (PCIE, 32)),
    "l4": _figures("L4", "NVIDIA L4 data sheet", (121, 242, 242), (22.5, 300), (PCIE, 32)),
    "rtx-3090": _figures("RTX 3090", "NVIDIA Ampere GA102 white paper", (71, 0, 284), (24, 936), (PCIE, 32)),
    "rtx-4090": _figures("RTX 4090", ADA, (165.2, 330.3, 660.6), (24, 1008), (PCIE, 32)),
    "rtx-5090": _figures("RTX 5090", BLACKWELL, (209.5, 419, 838), (32, 1792), (PCIE, 64), PCIE_5),
}
"""Machines by the name in ``--machine``. Error correction takes a sixteenth of the memory of L40S and L4."""

MACHINES: Mapping[str, Machine] = {"h200": H200} | {key: from_published(one) for key, one in PUBLISHED.items()}
