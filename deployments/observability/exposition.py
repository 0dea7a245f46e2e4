"""Metrics endpoint of the whole application, served by one ingress replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.names import APPLICATION, INGRESS
from deployments.observability.metrics import Families, Page, own_families
from deployments.observability.metrics_settings import MetricsSettings

RETRY_S = 2.0
ANSWER_DEADLINE_S = 3.0

logger = logging.getLogger("troupe.metrics")

ReplicaMetrics = tuple[str, Families]
"""A replica's name and its metrics."""


def replica_metrics() -> ReplicaMetrics:
    """Return the name and metrics of the replica that runs this process."""
    context = serve.get_replica_context()
    return f"{context.deployment}#{context.replica_id.unique_id}", own_families()


class Exposition:
    """Serves ``/metrics`` from a thread of this replica as soon as the address is free.

    One ingress replica per machine holds the address; another takes over when it ends. The page has the metrics of all
    ingress replicas and ``denoisers`` that answer their method ``metrics``.
    """

    def __init__(self, settings: MetricsSettings, denoisers: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._settings, self._denoisers = settings, denoisers
        self._ingress: DeploymentHandle[Any] | None = None
        if settings.number is not None:
            threading.Thread(target=self._hold, args=(settings.number,), daemon=True, name="metrics").start()

    def _hold(self, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(Page(lambda: dict(self._gather())))
        is_logged = False
        while True:
            try:
                start_http_server(port, self._settings.host, registry)
            except OSError as error:
                if not is_logged:
                    fields = {"url": self._settings.url, "reason": str(error)}
                    logger.info("another process serves metrics, or the address cannot be used", extra=fields)
                is_logged = True
                threading.Event().wait(RETRY_S)
                continue
            return

    def _gather(self) -> Iterator[ReplicaMetrics]:
        if self._ingress is None:
            self._ingress = serve.get_deployment_handle(INGRESS, APPLICATION)
        handles = {INGRESS: self._ingress, **self._denoisers}
        with ThreadPoolExecutor(len(handles)) as pool:  # a deployment that hangs does not delay the others
            for answers in pool.map(_answers, handles.keys(), handles.values()):
                yield from answers


def _answers(name: str, handle: DeploymentHandle[Any]) -> list[ReplicaMetrics]:
    """Return the metrics of a deployment's replicas that answer in time."""
    try:
        answers = handle.broadcast("metrics").results(timeout_s=ANSWER_DEADLINE_S, return_exceptions=True)
    except DeploymentUnavailableError:  # no replica
        return []
    except (RayError, RayServeException, TimeoutError) as error:
        answers = [error]
    for failure in (one for one in answers if isinstance(one, Exception)):
        logger.warning("a replica did not report its metrics", extra={"deployment": name, "reason": str(failure)})
    return [one for one in answers if not isinstance(one, Exception)]
