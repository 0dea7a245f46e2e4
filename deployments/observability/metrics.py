"""Prometheus metrics of the application: what ingresses count, and the page with all that its processes counted.

The gang's own are in ``engines.gang.metrics``. Each process counts for itself, so that a sum is one of values as they
were observed, and the label ``replica`` keeps those of different processes apart: added up here, they would fall when
a replica ends, and Prometheus would take that for a restart of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric, disable_created_metrics
from prometheus_client.registry import Collector

from deployments.names import url_at
from deployments.usage.quotas import EVERYBODY, KeyLimits

disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
OWN = ("troupe_", "process_")
"""How the names begin that are shown; Ray and its libraries count in the same processes."""

STAGES = Histogram("troupe_stage_seconds", "Seconds a request spent in a stage", ("stage", "model"), buckets=BUCKETS_S)
REQUEST_FAILURES = Counter("troupe_request_failures", "Runs of a request that failed, by cause", ("model", "cause"))
CLIP_WAITS = Histogram(
    "troupe_clip_wait_seconds", "Seconds from a clip's request to its first attempt", ("model",), buckets=BUCKETS_S
)
HTTP_REQUESTS = Counter("troupe_http_requests", "Answers of the HTTP API", ("method", "route", "status"))

ENCODINGS = Counter(
    "troupe_encodings", "Conditionings that jobs got: encoded, or kept from a request before", ("model", "source")
)
GPU_SECONDS = Counter(
    "troupe_gpu_seconds", "Seconds of ranks in the steps of requests that keys pay for", ("model", "key")
)

QUEUES = Histogram(
    "troupe_queue_seconds", "Seconds finished requests waited for their turn", ("model", "tier"), buckets=BUCKETS_S
)
OPEN = Gauge("troupe_requests_open", "Requests for pictures and clips under way", ("model", "tier"))
PREDICTED = Histogram(
    "troupe_predicted_seconds", "Seconds finished requests were predicted to take", ("model",), buckets=BUCKETS_S
)
RATIOS = Histogram(
    "troupe_prediction_ratio", "What requests took, in times what was predicted", ("model",), buckets=RATIO_BUCKETS
)
DEADLINES = Counter("troupe_deadlines", "Requests with a deadline, by what became of it", ("model", "outcome"))

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Clients may send any word, and each would be a series."""

Families = list[Metric]
DeadlineOutcome = Literal["met", "missed", "refused", "failed"]


def observe_stage(stage: str, model: str, seconds: float) -> None:
    """Count ``seconds`` in a stage: queue (waiting), encode, denoise, decode or total."""
    STAGES.labels(stage, model).observe(seconds)


def observe_encoding(model: str, *, was_kept: bool) -> None:
    """Count a job's conditioning, by whether an encoder made it for this job."""
    ENCODINGS.labels(model, "kept" if was_kept else "encoded").inc()


def observe_failure(model: str, cause: str) -> None:
    """Count a failed run of a request; ``cause`` is the exception's class name."""
    REQUEST_FAILURES.labels(model, cause).inc()


def observe_clip_wait(model: str, seconds: float) -> None:
    """Count the ``seconds`` that a clip waited for a runner: beside those in a gang's queue."""
    CLIP_WAITS.labels(model).observe(seconds)


def observe_answer(method: str, route: str, status: int) -> None:
    """Count an answer; ``route`` is the path as it is declared, or empty where there is no such route."""
    HTTP_REQUESTS.labels(method if method in METHODS else "other", route, status).inc()


def observe_gpu_seconds(model: str, key: str, seconds: float) -> None:
    """Count ``seconds`` of ranks for a request that has ended; ``key`` is what ``KeyNames`` calls its API key."""
    GPU_SECONDS.labels(model, key).inc(seconds)


@contextmanager
def observe_open(model: str, tier: str) -> Iterator[None]:
    """Count a request as under way inside the block; ``tier`` is how urgent it is."""
    with OPEN.labels(model, tier).track_inprogress():
        yield


def observe_turn(model: str, tier: str, queue_s: float, predicted_s: float | None, total_s: float) -> None:
    """Count how long a finished request waited, and what it took beside what was predicted, if anything was."""
    QUEUES.labels(model, tier).observe(queue_s)
    if predicted_s:
        PREDICTED.labels(model).observe(predicted_s)
        RATIOS.labels(model).observe(total_s / predicted_s)


def observe_deadline(model: str, outcome: DeadlineOutcome) -> None:
    """Count a request with a deadline that has ended; one whose client went away does not count."""
    DEADLINES.labels(model, outcome).inc()


def own_families() -> Families:
    """Return what this process has counted."""
    return [family for family in REGISTRY.collect() if family.name.startswith(OWN)]


def with_replicas(pages: Mapping[str, Iterable[Metric]]) -> Iterator[Metric]:
    """Yield the series of all processes, told apart by the label ``replica``: the keys of ``pages``."""
    whole: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in page:
            known = Metric(family.name, family.documentation, family.type, family.unit)
            target = whole.setdefault(family.name, known)
            for sample in family.samples:
                target.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    yield from whole.values()


class Page(Collector):
    """Asks all processes whenever it is read."""

    def __init__(self, gather: Callable[[], Mapping[str, Iterable[Metric]]]) -> None:
        self._gather = gather

    def collect(self) -> Iterator[Metric]:
        return with_replicas(self._gather())


SHOWN_DIGITS = 8
MAX_UNNAMED = 100
OTHERS = "other"


class KeyNames:
    """Metric labels: a key's configured ``name``, else eight digits of its hash; ``OTHERS`` after ``MAX_UNNAMED``."""

    def __init__(self, limits_of: Callable[[str], KeyLimits]) -> None:
        self._limits_of = limits_of
        self._unnamed: set[str] = set()

    def name_of(self, key: str) -> str:
        limits, digits = self._limits_of(key), key[:SHOWN_DIGITS]
        if limits.name and limits.key != EVERYBODY:
            return limits.name
        if digits not in self._unnamed and len(self._unnamed) >= MAX_UNNAMED:
            return OTHERS
        self._unnamed.add(digits)
        return digits

    def observe_gpu_seconds(self, model: str, key: str, gpu_s: float) -> None:
        """Count the seconds of ranks for a request of ``key`` that has ended."""
        observe_gpu_seconds(model, self.name_of(key), gpu_s)


DEFAULT_PORT = 9464


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Where Prometheus finds them: ``/metrics`` on this address, of a port of its own. Without a port, nowhere.

    ``auto`` is DEFAULT_PORT; ``troupe serve`` takes the next free one after it where that is taken.
    """

    host: str = "127.0.0.1"
    port: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.number is not None and not 0 < self.number <= 65535:
            raise ValueError(f"metrics.port is {self.port}; it must be auto, from 1 to 65535, or null for no metrics")

    @property
    def number(self) -> int | None:
        """The port; None without metrics."""
        return DEFAULT_PORT if self.port == "auto" else self.port

    @property
    def url(self) -> str:
        """The URL on this machine; empty without metrics."""
        return "" if self.number is None else f"{url_at(self.host, self.number)}/metrics"
