"""What a gang counts, exported by Ray to Prometheus (which prefixes the names with ``ray_``)."""

from __future__ import annotations

from typing import Literal

from ray.util.metrics import Counter, Gauge, Histogram

from engines.gang.errors import BreakCause

STEP_BOUNDARIES_MS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4]

Outcome = Literal["done", "failed", "cancelled", "broken", "rejected"]


class GangMetrics:
    """The series of one gang. Serve starts a gang anew after each failure: restarts are starts less replicas."""

    def __init__(self, model: str) -> None:
        model_tag = {"model": model}
        self._step_ms = Histogram(
            "troupe_step_ms",
            description="Duration of one denoising step, by model and number of ranks",
            boundaries=STEP_BOUNDARIES_MS,
            tag_keys=("model", "num_ranks"),
        )
        self._starts = Counter("troupe_gang_starts", description="Gangs that became ready", tag_keys=("model",))
        self._failures = Counter(
            "troupe_gang_failures", description="Gangs that broke, by cause", tag_keys=("model", "cause")
        )
        self._jobs = Counter("troupe_jobs", description="Jobs by how they ended", tag_keys=("model", "outcome"))
        self._open = Gauge("troupe_open_jobs", description="Jobs that run or wait", tag_keys=("model",))
        for metric in (self._step_ms, self._starts, self._failures, self._jobs, self._open):
            metric.set_default_tags(model_tag)

    def step_done(self, step_ms: float, num_ranks: int) -> None:
        self._step_ms.observe(step_ms, tags={"num_ranks": str(num_ranks)})

    def gang_started(self) -> None:
        self._starts.inc()

    def gang_broke(self, cause: BreakCause) -> None:
        self._failures.inc(tags={"cause": cause})

    def job_ended(self, outcome: Outcome) -> None:
        self._jobs.inc(tags={"outcome": outcome})

    def open_jobs(self, num_jobs: int) -> None:
        self._open.set(num_jobs)
