"""Prometheus metrics of the application, through Ray's agent. The gang's own are in ``engines.gang.metrics``."""

from __future__ import annotations

from functools import cache

from ray.util.metrics import Counter, Histogram

STAGE_BOUNDARIES_S = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


@cache
def _stage_seconds() -> Histogram:
    return Histogram(
        "troupe_stage_seconds",
        description="Seconds a request spent in a stage",
        boundaries=STAGE_BOUNDARIES_S,
        tag_keys=("stage", "model"),
    )


@cache
def _failures() -> Counter:
    return Counter(
        "troupe_request_failures", description="Runs of a request that failed, by cause", tag_keys=("model", "cause")
    )


def observe_stage(stage: str, model: str, seconds: float) -> None:
    """Counts ``seconds`` in a stage: queue, encode, denoise, decode or total."""
    _stage_seconds().observe(seconds, tags={"stage": stage, "model": model})


def observe_failure(model: str, cause: str) -> None:
    """Counts a failed run of a request; ``cause`` is the exception's class name."""
    _failures().inc(tags={"model": model, "cause": cause})
