"""Machines that can be planned for without having one, by name."""

from __future__ import annotations

from engines.planner.machine import Line, Machine

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

MACHINES = {"h200": H200}
