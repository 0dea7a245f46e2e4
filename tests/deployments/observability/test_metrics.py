"""The application's own metrics on Ray's page for Prometheus."""

from __future__ import annotations

import re

import httpx
import ray

from deployments.observability.metrics import observe_failure, observe_stage
from tests.deployments.support.live import wait_until

MODEL = "observed"
STAGES = ("queue", "encode", "denoise", "decode", "total")


def series(name: str) -> dict[str, float]:
    """What is exported under ``name`` for our model, by the label that tells it apart."""
    node = ray.nodes()[0]
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{") and f'model="{MODEL}"' in line]
    labels = (re.search(r'(?:stage|cause)="([^"]*)"', line) for line in lines)
    return {label[1]: float(line.rsplit(" ", 1)[1]) for label, line in zip(labels, lines, strict=True) if label}


def test_stages_and_failures_reach_prometheus(ray_cluster: None) -> None:
    for number, stage in enumerate(STAGES, start=1):
        for _ in range(number):
            observe_stage(stage, MODEL, 0.5)
    observe_failure(MODEL, "GangBrokenError")
    counts = {stage: float(number) for number, stage in enumerate(STAGES, start=1)}
    wait_until(lambda: series("ray_troupe_stage_seconds_count") == counts, "stages")
    wait_until(lambda: series("ray_troupe_request_failures_total") == {"GangBrokenError": 1.0}, "failures")
