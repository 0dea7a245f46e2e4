"""The page of metrics queries the right replicas, and shows those that answer."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployments.observability.exposition import Exposition, ReplicaMetrics
from deployments.observability.metrics_settings import MetricsSettings
from tests.support.patience import PATIENCE_S


class Deployment:
    """A handle whose replicas give ``answers``, once all concurrent queries ``meet``."""

    def __init__(self, *answers: ReplicaMetrics | Exception, meet: threading.Barrier) -> None:
        self._answers, self._meet = answers, meet

    def broadcast(self, method: str) -> Deployment:
        assert method == "metrics"
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool = False) -> list[ReplicaMetrics | Exception]:
        self._meet.wait(PATIENCE_S)
        failure = next((one for one in self._answers if isinstance(one, Exception)), None)
        if failure is not None and not return_exceptions:
            raise failure
        return [*self._answers]


@pytest.fixture
def meet() -> threading.Barrier:
    return threading.Barrier(2)


def gathered(monkeypatch: pytest.MonkeyPatch, ingress: Deployment, denoiser: Any) -> list[str]:
    """Return the names of the shown replicas."""
    monkeypatch.setattr("deployments.observability.exposition.serve.get_deployment_handle", lambda *_: ingress)
    return [name for name, _ in Exposition(MetricsSettings(port=None), {"m": denoiser})._gather()]


def test_deployments_are_asked_side_by_side(monkeypatch: pytest.MonkeyPatch, meet: threading.Barrier) -> None:
    ingress, denoiser = Deployment(("Ingress#a", []), meet=meet), Deployment(("Denoiser-m#b", []), meet=meet)
    assert gathered(monkeypatch, ingress, denoiser) == ["Ingress#a", "Denoiser-m#b"]


def test_a_replica_that_does_not_answer_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, meet: threading.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    ingress = Deployment(("Ingress#a", []), meet=meet)
    denoiser = Deployment(RayActorError(), TimeoutError("not in time"), ("Denoiser-m#b", []), meet=meet)
    with caplog.at_level(logging.WARNING, "troupe.metrics"):
        assert gathered(monkeypatch, ingress, denoiser) == ["Ingress#a", "Denoiser-m#b"]
    assert caplog.text.count("a replica did not report its metrics") == 2
