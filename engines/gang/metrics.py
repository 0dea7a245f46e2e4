"""Prometheus metrics of a gang, in the process that owns it; all times in seconds."""

from __future__ import annotations

from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from engines.gang.errors import BreakCause

STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
START_BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

STEPS = Histogram(
    "troupe_step_seconds", "Seconds of one denoising step", ("model", "num_ranks"), buckets=STEP_BUCKETS_S
)
SWAPS = Histogram(
    "troupe_swap_seconds",
    "Seconds in which a gang's weights went to the host (sleep) or came back (wake)",
    ("model", "direction"),
    buckets=STEP_BUCKETS_S,
)
AWAKE = Gauge("troupe_gangs_awake", "Gangs whose weights are on their devices", ("model",))
STARTS = Histogram(
    "troupe_gang_start_seconds",
    "Seconds from the start of a gang's ranks until it takes jobs",
    ("model",),
    buckets=START_BUCKETS_S,
)
PHASES = Histogram(
    "troupe_gang_start_phase_seconds",
    "Seconds of a gang's start in one of its phases",
    ("model", "phase"),
    buckets=STEP_BUCKETS_S,
)
FAILURES = Counter("troupe_gang_failures", "Gangs that broke, by cause", ("model", "cause"))
GANGS = Gauge("troupe_gangs", "Gangs that take jobs", ("model",))
JOBS = Counter("troupe_jobs", "Jobs by how they ended", ("model", "outcome"))
COLD_JOBS = Counter("troupe_cold_jobs", "Finished jobs of a shape that had to be prepared first", ("model",))
RUNNING = Gauge("troupe_jobs_running", "Jobs that may have begun", ("model",))
WAITING = Gauge("troupe_jobs_waiting", "Jobs beyond these", ("model",))

Outcome = Literal["done", "failed", "cancelled", "broken", "rejected"]


class GangMetrics:
    """The series of one gang."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._is_awake = False
        self._running, self._waiting = RUNNING.labels(model), WAITING.labels(model)
        self.open_jobs(0, 0)

    def step_done(self, step_s: float, num_ranks: int) -> None:
        STEPS.labels(self.model, num_ranks).observe(step_s)

    def takes_jobs(self) -> None:
        GANGS.labels(self.model).inc()
        self._awake(True)

    def takes_none(self) -> None:
        GANGS.labels(self.model).dec()
        self._awake(False)

    def swapped(self, *, is_asleep: bool, swap_s: float) -> None:
        SWAPS.labels(self.model, "sleep" if is_asleep else "wake").observe(swap_s)
        self._awake(not is_asleep)

    def _awake(self, is_awake: bool) -> None:
        AWAKE.labels(self.model).inc(is_awake - self._is_awake)
        self._is_awake = is_awake

    def gang_broke(self, cause: BreakCause) -> None:
        FAILURES.labels(self.model, cause).inc()

    def job_ended(self, outcome: Outcome) -> None:
        JOBS.labels(self.model, outcome).inc()

    def job_was_cold(self) -> None:
        COLD_JOBS.labels(self.model).inc()

    def open_jobs(self, num_running: int, num_waiting: int) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
