"""The dashboard uses metrics and labels that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

import engines.gang.metrics
from deployments.observability import metrics
from tests.support.fenced import ROOT

PANELS: list[dict[str, Any]] = json.loads((ROOT / "deployments/observability/grafana.json").read_text())["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
SUFFIXES: dict[str | None, tuple[str, ...]] = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}
MODULES = (metrics, engines.gang.metrics)


def labels_by_series() -> dict[str, set[str]]:
    """Return the labels of every series that the application exports, by its name."""
    own = [one for module in MODULES for one in vars(module).values() if isinstance(one, MetricWrapperBase)]
    assert all(one in REGISTRY._collector_to_names for one in own)
    return {
        f"{one._name}{suffix}": {*one._labelnames, "replica"} | ({"le"} if suffix == "_bucket" else set())
        for one in own
        for suffix in SUFFIXES[one._type]
    }


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_queries_are_of_series_and_labels_that_there_are(title: str, query: str) -> None:
    known = labels_by_series()
    series = re.findall(r"troupe_\w+", query)
    assert series
    assert set(series) <= set(known), title
    grouped = {label for words in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", words)}
    selected = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query))
    for name in series:
        assert grouped | selected <= known[name], f"{title}: {name} has {known[name]}"
    assert query.count("(") == query.count(")")


def test_panels_show_what_a_loaded_server_is_asked_about() -> None:
    text = " ".join(query for _, query in QUERIES)
    for name in ("requests_open", "queue_seconds", "predicted_seconds", "deadlines_total", "gpu_seconds_total"):
        assert f"troupe_{name}" in text
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in PANELS})
