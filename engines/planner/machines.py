"""Machines that can be planned for without having one, by name: one that was measured, others by published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.planner.machine import Line, Machine, Rates

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
"""NCCL 2.28. Speeds as the engine measures them at start; latencies inside a captured step, which are 15 to 20 us lower
than those of calls from Python (of all-reduce and rotation: taken from all-gather)."""

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
"""Measured (benchmarks/reports/denoise_step_h200_2026-11-21.md): bf16 products of 3072 and 12288 features as a step
mixes them, and attention of 128-wide heads, at the clock that a GPU keeps under such a load (cool, they are 10 to
20 % faster); float8 with its quantisation; int8 products by themselves, no faster than bf16's.
"""

TERA, GIGA = 1e12, 1e9
NVLINK, PCIE = "NVLink", "PCIe"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFigures:
    """Published figures of a GPU. Rates are dense: without sparsity, accumulated in float32 (int8 in int32).

    ``bf16``, ``fp8``, ``int8``: FLOP/s (0: the GPU has no such product). ``memory_bytes_per_s``: of its memory.
    ``memory_gib``: as named, less what error correction takes where memory has no room of its own for it.
    ``link_bytes_per_s``: between two GPUs of a host, in each direction. ``source``: the document.
    """

    name: str
    source: str
    bf16: float
    fp8: float
    int8: float
    memory_bytes_per_s: float
    memory_gib: float
    link: str
    link_bytes_per_s: float


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
    """Return the machine that reaches the same share of its published figures as ``H200`` does of its own.

    Latencies of exchanges are those of ``H200``.
    """

    def scaled(rates: Rates, own: float, known: float) -> Rates:
        return tuple((size, rate * own / known) for size, rate in rates)

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
    )


def _figures(
    name: str,
    source: str,
    tera_flop: tuple[float, float, float],
    memory: tuple[float, float],
    link: tuple[str, float],
) -> PublishedFigures:
    """``tera_flop`` of bf16, fp8 and int8, ``memory`` in GiB and GB/s, ``link`` in GB/s in each direction."""
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
    )


ADA, BLACKWELL = "NVIDIA Ada GPU architecture white paper", "NVIDIA RTX Blackwell GPU architecture white paper"
A100, H100 = "NVIDIA A100 data sheet", "NVIDIA H100 data sheet"
PUBLISHED: Mapping[str, PublishedFigures] = {
    "b200": _figures("B200", "NVIDIA DGX B200 data sheet", (2250, 4500, 4500), (180, 8000), (NVLINK, 900)),
    "h100": _figures("H100 SXM", H100, (989, 1979, 1979), (80, 3350), (NVLINK, 450)),
    "h100-pcie": _figures("H100 PCIe", H100, (756, 1513, 1513), (80, 2000), (PCIE, 64)),
    "a100": _figures("A100 80 GB SXM", A100, (312, 0, 624), (80, 2039), (NVLINK, 300)),
    "a100-40gb": _figures("A100 40 GB SXM", A100, (312, 0, 624), (40, 1555), (NVLINK, 300)),
    "a100-pcie": _figures("A100 80 GB PCIe", A100, (312, 0, 624), (80, 1935), (PCIE, 32)),
    "l40s": _figures("L40S", "NVIDIA L40S data sheet", (362, 733, 733), (45, 864), (PCIE, 32)),
    "l4": _figures("L4", "NVIDIA L4 data sheet", (121, 242, 242), (22.5, 300), (PCIE, 32)),
    "rtx-3090": _figures("RTX 3090", "NVIDIA Ampere GA102 white paper", (71, 0, 284), (24, 936), (PCIE, 32)),
    "rtx-4090": _figures("RTX 4090", ADA, (165.2, 330.3, 660.6), (24, 1008), (PCIE, 32)),
    "rtx-5090": _figures("RTX 5090", BLACKWELL, (209.5, 419, 838), (32, 1792), (PCIE, 64)),
}
"""By the name of ``--machine``. Error correction takes a sixteenth of the memory of L40S and L4."""

MACHINES: Mapping[str, Machine] = {"h200": H200} | {key: from_published(one) for key, one in PUBLISHED.items()}
