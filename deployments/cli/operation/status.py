"""``troupe status``: whether a server is ready, and how much it has to do."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from deployments.cli.client import Client, kinds_of
from deployments.cli.local.proxies import http_client
from deployments.cli.operation.servers import the_server
from deployments.cli.progress import console

UNKNOWN = "–"
GAUGES = {"gangs": "troupe_gangs", "running": "troupe_jobs_running", "waiting": "troupe_jobs_waiting"}
"""Columns of the table, and where in the metrics they come from."""
TIMEOUT_S = 10.0

Counts = Mapping[str, Mapping[str, int]]
"""Model to count, by column."""


def print_status(url: str, api_key: str, metrics_url: str, *, as_json: bool = False) -> bool:
    """Print a line for each model, or one JSON object; return whether all of them are ready.

    Without ``url`` it is the server that runs here. ValueError if that is not clear; httpx's errors if nobody answers.
    """
    if not url:
        server = the_server()
        url, metrics_url = server.url, metrics_url or server.metrics_url
    with Client(url, api_key) as client:
        health = client.health()
        cards = {card["id"]: card for card in client.models()}
    counts = _counts(metrics_url)
    is_ready = bool(health) and all(state == "ready" for state in health.values())
    if as_json:
        states = [_document(model, state, cards, counts) for model, state in health.items()]
        print(json.dumps({"url": url, "ready": is_ready, "models": states}, indent=2))
        return is_ready
    table = Table("model", "kind", *GAUGES, "state")
    table.columns[0].overflow = "fold"
    for model, state in health.items():
        numbers = (str(counts[column].get(model, 0)) if counts else UNKNOWN for column in GAUGES)
        kinds = ", ".join(kinds_of(cards[model])) if model in cards else UNKNOWN
        table.add_row(model, kinds, *numbers, state)
    console.print(f"{url} is {'ready' if is_ready else 'not ready'}", soft_wrap=True)
    console.print(table)
    if not counts:
        where = f"{metrics_url} does not answer" if metrics_url else "give --metrics-url"
        console.print(f"No numbers of gangs and jobs: {where}", soft_wrap=True)
    return is_ready


def _document(model: str, state: str, cards: Mapping[str, dict[str, Any]], counts: Counts) -> dict[str, Any]:
    """Return what is known of a model; null for what is not."""
    numbers = {column: counts[column].get(model, 0) if counts else None for column in GAUGES}
    return {"id": model, "kinds": list(kinds_of(cards[model])) if model in cards else None, **numbers, "state": state}


def _counts(metrics_url: str) -> Counts:
    """Return what the metrics say now; nothing where there are none."""
    if not metrics_url:
        return {}
    try:
        with http_client(metrics_url, timeout=TIMEOUT_S) as http:
            page = http.get(metrics_url)
    except httpx.RequestError:
        return {}
    return counts_of(page.text) if page.is_success else {}


def counts_of(page: str) -> Counts:
    """Return the gauges of a page in Prometheus' text format, summed over replicas."""
    columns = {gauge: column for column, gauge in GAUGES.items()}
    counts: dict[str, dict[str, Any]] = {column: defaultdict(int) for column in GAUGES}
    for family in text_string_to_metric_families(page):
        if column := columns.get(family.name):
            for sample in family.samples:
                counts[column][sample.labels["model"]] += int(sample.value)
    return counts
