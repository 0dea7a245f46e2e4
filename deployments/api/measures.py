"""Headers of answers that say how long things took, and what was predicted."""

from __future__ import annotations

from deployments.studio.interface import StageTimes


def measures(timings: list[StageTimes]) -> dict[str, str]:
    """Returns headers that tell where the time went, what was predicted, and whether every picture's shape was warm."""
    is_warm = all(one.was_warm for one in timings)
    return {
        "Server-Timing": server_timing(timings),
        "X-Troupe-Warm": "true" if is_warm else "false",
        "X-Troupe-Gpu-Seconds": seconds(sum(one.gpu_s for one in timings)),
        "X-Troupe-Eta": seconds(max(one.eta_s for one in timings)),
    }


def seconds(value: float) -> str:
    """Returns seconds as headers have them."""
    return f"{value:.3f}"


def server_timing(timings: list[StageTimes]) -> str:
    """Returns a ``Server-Timing`` header in milliseconds, each stage's slowest of pictures that ran side by side."""
    stages = ("queue", "encode", "denoise", "decode", "total")
    slowest = {stage: max(getattr(one, f"{stage}_s") for one in timings) for stage in stages}
    return ", ".join(f"{stage};dur={1000 * seconds:.1f}" for stage, seconds in slowest.items())
