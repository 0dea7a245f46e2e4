"""Prometheus metrics of ingress replicas, and the page with the metrics of all processes.

The gang's metrics are in ``engines.gang.metrics``. Each process counts its own values, with its label ``replica``. A
sum over processes would fall when a replica ends, which Prometheus would treat as a counter reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric, disable_created_metrics
from prometheus_client.registry import Collector

from deployments.usage.api_keys import EVERYBODY
from deployments.usage.quotas import KeyLimits

disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
OWN = ("troupe_", "process_")
"""Prefixes of exported names; Ray and its libraries count in the same processes."""
SHOWN_DIGITS = 8
MAX_UNNAMED = 100
OTHERS = "other"

STAGE_SECONDS = Histogram(
    "troupe_stage_seconds", "Seconds a request spent in a stage", ("stage", "model"), buckets=BUCKETS_S
)
REQUEST_FAILURES = Counter("troupe_request_failures", "Runs of a request that failed, by cause", ("model", "cause"))
"""A cause is the class name of the exception."""
CLIP_WAITS = Histogram(
    "troupe_clip_wait_seconds", "Seconds from a clip's request to its first attempt", ("model",), buckets=BUCKETS_S
)
HTTP_REQUESTS = Counter("troupe_http_requests", "Answers of the HTTP API", ("method", "route", "status"))

ENCODINGS = Counter("troupe_encodings", "Conditionings of jobs, encoded or from the cache", ("model", "source"))
ENHANCEMENTS = Histogram(
    "troupe_enhance_seconds", "Seconds a prompt enhancer took", ("model", "outcome"), buckets=BUCKETS_S
)
GPU_SECONDS = Counter("troupe_gpu_seconds", "GPU seconds of requests, by API key", ("model", "key"))

QUEUES = Histogram(
    "troupe_queue_seconds", "Seconds finished requests waited for their turn", ("model", "tier"), buckets=BUCKETS_S
)
OPEN = Gauge("troupe_requests_open", "Open requests for pictures and clips", ("model", "tier"))
PREDICTED = Histogram(
    "troupe_predicted_seconds", "Seconds finished requests were predicted to take", ("model",), buckets=BUCKETS_S
)
RATIOS = Histogram(
    "troupe_prediction_ratio", "Duration of requests, divided by its prediction", ("model",), buckets=RATIO_BUCKETS
)
DEADLINES = Counter("troupe_deadlines", "Requests with a deadline, by outcome", ("model", "outcome"))

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods with a series; clients may send any word."""

Families = list[Metric]


def observe_answer(method: str, route: str, status: int) -> None:
    """Count an answer; ``route`` is the declared path, empty if there is no such route."""
    HTTP_REQUESTS.labels(method if method in METHODS else "other", route, status).inc()


def observe_turn(model: str, tier: str, queue_s: float, predicted_s: float | None, total_s: float) -> None:
    """Observe the wait of a finished request, and its duration relative to the prediction, if there was one."""
    QUEUES.labels(model, tier).observe(queue_s)
    if predicted_s:
        PREDICTED.labels(model).observe(predicted_s)
        RATIOS.labels(model).observe(total_s / predicted_s)


def own_families() -> Families:
    """Return this process's metrics."""
    return [family for family in REGISTRY.collect() if family.name.startswith(OWN)]


def with_replicas(pages: Mapping[str, Iterable[Metric]]) -> Iterator[Metric]:
    """Yield the series of all processes; the label ``replica`` is the key of ``pages``."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in page:
            empty = Metric(family.name, family.documentation, family.type, family.unit)
            target = families.setdefault(family.name, empty)
            for sample in family.samples:
                target.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    yield from families.values()


class Page(Collector):
    """Metrics of all processes, gathered at each read."""

    def __init__(self, gather: Callable[[], Mapping[str, Iterable[Metric]]]) -> None:
        self._gather = gather

    def collect(self) -> Iterator[Metric]:
        return with_replicas(self._gather())


class KeyNames:
    """Metric labels of keys: the configured ``name``, else 8 digits of the hash; ``OTHERS`` after ``MAX_UNNAMED``."""

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
        """Count GPU seconds of an ended request of ``key``."""
        GPU_SECONDS.labels(model, self.name_of(key)).inc(gpu_s)
