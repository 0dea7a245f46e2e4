"""Machines that can be planned for without having one, by name."""

from __future__ import annotations

from engines.parallel.machine import Line, Machine

_ALL_TO_ALL = {2: Line(latency_s=21e-6, bytes_per_s=5.5e11), 4: Line(latency_s=12e-6, bytes_per_s=3.0e11)}
"""NCCL 2.28: 16 and 64 MB took 52 and 144 us on two GPUs, 7.1 and 21 MB 35 and 82 us on four."""

_ALL_GATHER = {2: Line(latency_s=15e-6, bytes_per_s=2.2e11), 4: Line(latency_s=18e-6, bytes_per_s=1.1e11)}
"""16 MB a rank took 92 us on two GPUs; on four, three shares arrive by the same links."""


def _exchanges() -> dict[str, Line]:
    """What was not measured follows from what was: a rotation moves one share, an all-reduce two halves of all."""
    lines: dict[str, Line] = {}
    for ranks, gather in _ALL_GATHER.items():
        one_share = Line(latency_s=gather.latency_s, bytes_per_s=gather.bytes_per_s * (ranks - 1))
        lines[f"all_to_all/{ranks}"] = _ALL_TO_ALL[ranks]
        lines[f"all_gather/{ranks}"] = gather
        lines[f"all_reduce/{ranks}"] = Line(latency_s=2 * gather.latency_s, bytes_per_s=gather.bytes_per_s * ranks / 2)
        lines[f"rotation/{ranks}"] = one_share
    return lines


H200 = Machine(
    name="H200 with NVLink, measured",
    products=((128, 3.6e14), (1024, 6.8e14), (1152, 6.4e14), (2304, 6.4e14), (4608, 6.7e14)),
    attention=((512, 3.0e14), (1536, 4.5e14), (4608, 5.6e14), (16896, 6.0e14)),
    copy_bytes_per_s=3.5e12,
    memory_bytes=139 * 2**30,
    exchanges=_exchanges(),
    quantised={
        "fp8": ((128, 3.0e14), (1024, 1.0e15), (1152, 1.05e15), (4608, 1.2e15)),
        "int8": ((512, 7.0e14), (4608, 1.2e15)),
    },
    fast_path=True,
)
"""From benchmarks/reports/denoise_step_h200_2026-11-21.md: bf16 products of 3072 and 12288 features as a step mixes
them, and attention of 128-wide heads, at the clock that a GPU keeps under such a load (alone and cool, they are 10 to
20 % faster); float8 with its quantisation. Of int8 there are estimates only.
"""

MACHINES = {"h200": H200}
