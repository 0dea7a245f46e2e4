"""The address where Prometheus reads the metrics of the whole application, held by one ingress replica."""

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
from deployments.observability.metrics import Families, MetricsSettings, Page, own_families

RETRY_S = 2.0
ANSWER_DEADLINE_S = 3.0

logger = logging.getLogger("troupe.metrics")

Counted = tuple[str, Families]
"""A replica's name, and what it has counted."""


def counted_here() -> Counted:
    """Return what a replica answers that is asked for what it has counted."""
    context = serve.get_replica_context()
    return f"{context.deployment}#{context.replica_id.unique_id}", own_families()


class Exposition:
    """Serves ``/metrics`` from a thread of this replica as soon as the address is free.

    Of several ingress replicas on a machine one holds it; when that one ends, the next that tries. Any of them shows
    what all replicas have counted that answer: ingresses and ``denoisers``, each asked by its method ``metrics``.
    """

    def __init__(self, settings: MetricsSettings, denoisers: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._settings, self._denoisers = settings, denoisers
        self._ingress: DeploymentHandle[Any] | None = None
        if settings.number is not None:
            threading.Thread(target=self._hold, args=(settings.number,), daemon=True, name="metrics").start()

    def _hold(self, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(Page(lambda: dict(self._gather())))
        said = False
        while True:
            try:
                start_http_server(port, self._settings.host, registry)
            except OSError as error:
                if not said:
                    logger.info("metrics are shown elsewhere, or nowhere: %s: %s", self._settings.url, error)
                said = True
                threading.Event().wait(RETRY_S)
                continue
            return

    def _gather(self) -> Iterator[Counted]:
        if self._ingress is None:
            self._ingress = serve.get_deployment_handle(INGRESS, APPLICATION)
        asked = {INGRESS: self._ingress, **self._denoisers}
        with ThreadPoolExecutor(len(asked)) as pool:  # a deployment that does not answer holds up no other
            for answers in pool.map(_answers, asked.keys(), asked.values()):
                yield from answers


def _answers(name: str, handle: DeploymentHandle[Any]) -> list[Counted]:
    """Return what those replicas of a deployment say that answer in time."""
    try:
        answers = handle.broadcast("metrics").results(timeout_s=ANSWER_DEADLINE_S, return_exceptions=True)
    except DeploymentUnavailableError:  # it has no replica now
        return []
    except (RayError, RayServeException, TimeoutError) as error:
        answers = [error]
    for failure in (one for one in answers if isinstance(one, Exception)):
        logger.warning("%s did not say what it has counted: %s", name, failure)
    return [one for one in answers if not isinstance(one, Exception)]
