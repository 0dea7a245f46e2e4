"""A process counts, and a page shows the counts of all processes."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from deployments.observability.metrics import REQUEST_FAILURES, STAGE_SECONDS, Page, observe_answer, own_families
from deployments.observability.metrics_settings import MetricsSettings
from tests.support.patience import PATIENCE_S

MODEL = "observed"
SECONDS = (0.0625, 0.375, 7.0, 95.0)
"""Values exact in binary, so that their sum is."""


@pytest.fixture
def families() -> dict[str, Metric]:
    """Return the families as Prometheus reads them, of two replicas with equal counts."""
    registry = CollectorRegistry()
    registry.register(Page(lambda: {"Ingress#a": own_families(), "Ingress#b": own_families()}))
    for stage in ("queue", "denoise"):
        for seconds in SECONDS:
            STAGE_SECONDS.labels(stage, MODEL).observe(seconds)
    REQUEST_FAILURES.labels(MODEL, "GangBrokenError").inc()
    page = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def values(family: Metric, name: str, **labels: str) -> list[float]:
    return [
        sample.value for sample in family.samples if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_sums_are_of_the_values_that_were_observed(families: dict[str, Metric]) -> None:
    stages = families["troupe_stage_seconds"]
    assert stages.type == "histogram"
    for replica in ("Ingress#a", "Ingress#b"):
        for stage in ("queue", "denoise"):
            where = {"model": MODEL, "stage": stage, "replica": replica}
            (total,) = values(stages, "troupe_stage_seconds_sum", **where)
            (count,) = values(stages, "troupe_stage_seconds_count", **where)
            assert total % sum(SECONDS) == 0  # the fixture counts again for each test
            assert total / sum(SECONDS) == count / len(SECONDS)
            (short,) = values(stages, "troupe_stage_seconds_bucket", le="0.1", **where)
            (minutes,) = values(stages, "troupe_stage_seconds_bucket", le="120.0", **where)
            assert (short / count, minutes / count) == (1 / 4, 1)


def test_failures_are_counted_by_cause(families: dict[str, Metric]) -> None:
    failures = families["troupe_request_failures"]
    assert failures.type == "counter"
    where = {"model": MODEL, "cause": "GangBrokenError"}
    assert all(value >= 1 for value in values(failures, "troupe_request_failures_total", **where))
    assert len(values(failures, "troupe_request_failures_total", **where)) == 2


def test_each_family_is_there_once_and_others_are_not(families: dict[str, Metric]) -> None:
    assert {name.split("_")[0] for name in families} == {"troupe", "process"}
    assert values(families["process_resident_memory_bytes"], "process_resident_memory_bytes", replica="Ingress#a")
    assert not [name for name in families if name.endswith("_created")]


def test_a_method_of_a_client_makes_no_series() -> None:
    observe_answer("MINE", "", 405)
    (answers,) = (family for family in own_families() if family.name == "troupe_http_requests")
    methods = {sample.labels["method"] for sample in answers.samples}
    assert "other" in methods
    assert "MINE" not in methods


def test_the_page_is_served_where_settings_say() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        settings = MetricsSettings(port=probe.getsockname()[1])
    registry = CollectorRegistry()
    registry.register(Page(lambda: {"Ingress#a": own_families()}))
    assert isinstance(settings.port, int)
    server, thread = start_http_server(settings.port, settings.host, registry)
    try:
        answer = httpx.get(settings.url, timeout=PATIENCE_S)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert answer.headers["content-type"].startswith("text/plain")
    assert list(text_string_to_metric_families(answer.text))


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=r"metrics\.port is"):
        MetricsSettings(port=port)


def test_without_a_port_there_is_no_url() -> None:
    assert MetricsSettings(port=None).url == ""
    assert MetricsSettings(host="0.0.0.0", port=9).url == "http://127.0.0.1:9/metrics"
    assert MetricsSettings(host="::1", port=9).url == "http://[::1]:9/metrics"
