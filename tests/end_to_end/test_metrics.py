"""The sums in ``/metrics`` of the running application are those of the timings in the answers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.support.live import PROMPT, TIMEOUT_S, stream_of, wait_until
from tests.end_to_end.conftest import CLIPS, EDITS, METRICS_URL, PICTURES
from tests.support.fenced import ROOT

STAGES = ("queue", "encode", "denoise", "decode", "total")
PHASES = ("processes", "connect", "load", "build")
MODEL = {"model": PICTURES}
REPLICAS = {"Ingress", *(f"Denoiser-{model}" for model in (PICTURES, CLIPS, EDITS))}
ROUTE = {"method": "POST", "route": "/v1/images/generations"}
ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""Suffixes that a type adds to the name of its family."""


Sample = tuple[str, frozenset[tuple[str, str]]]
"""A name, and labels."""


def page() -> list[Metric]:
    """Return the page once every process has answered in time: it omits the others."""
    families: list[Metric] = []

    def is_whole() -> bool:
        families[:] = text_string_to_metric_families(httpx.get(METRICS_URL, timeout=TIMEOUT_S).text)
        return replicas_of(families) >= REPLICAS

    wait_until(is_whole, "every process says what it has counted")
    return families


def replicas_of(families: list[Metric]) -> set[str]:
    return {sample.labels["replica"].partition("#")[0] for family in families for sample in family.samples}


def page_sums() -> Mapping[Sample, float]:
    """Return every sample, summed over replicas. Its port is not the API's, as with Prometheus."""
    samples: defaultdict[Sample, float] = defaultdict(float)
    for family in page():
        for sample in family.samples:
            labels = frozenset((name, value) for name, value in sample.labels.items() if name != "replica")
            samples[sample.name, labels] += sample.value
    return samples


def num_grown(before: Mapping[Sample, float], *keys: Sample) -> float:
    now = page_sums()
    return sum(now[key] - before[key] for key in keys)


def named(name: str, **labels: str) -> Sample:
    return name, frozenset(labels.items())


async def paint(client: httpx.AsyncClient, seed: int) -> Mapping[str, float]:
    """Return the timings in the answer."""
    body = {"prompt": PROMPT, "seed": seed, "num_inference_steps": 4, "deadline_s": TIMEOUT_S, "service_tier": "flex"}
    async with stream_of(client, body) as events:
        *_, last = [event async for event in events]
    timings: Mapping[str, float] = last["timings"]
    return timings


async def paint_until_predicted(client: httpx.AsyncClient, answers: Sample) -> None:
    """Request pictures until one has a prediction: if this test runs first, nothing similar was measured."""
    before, timings = page_sums(), [await paint(client, seed=0)]
    while timings[-1]["eta_s"] is None:
        timings.append(await paint(client, seed=0))
    wait_until(lambda: num_grown(before, answers) == len(timings), "the end of each answer is counted")


async def test_sums_are_those_of_the_timings_in_the_answers(url: str) -> None:
    wait_until(lambda: page_sums()[named("troupe_gangs", **MODEL)] == 1, "the gang's own are there")
    answers = {status: named("troupe_http_requests_total", **ROUTE, status=status) for status in ("200", "400")}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await paint_until_predicted(client, answers["200"])
        before = page_sums()
        timings = [await paint(client, seed) for seed in range(3)]
        assert (await client.post("/v1/images/generations", json={"prompt": PROMPT, "size": "1x1"})).status_code == 400
    wait_until(lambda: num_grown(before, *answers.values()) == 4, "the end of each answer is counted")
    after = page_sums()
    grown = {key: after[key] - before[key] for key in after}
    for stage in STAGES:
        labels = MODEL | {"stage": stage}
        told_s = sum(each[f"{stage}_s"] for each in timings)
        assert grown[named("troupe_stage_seconds_sum", **labels)] == pytest.approx(told_s, rel=1e-6)
        assert grown[named("troupe_stage_seconds_count", **labels)] == 3
        assert grown[named("troupe_stage_seconds_bucket", **labels, le="+Inf")] == 3
    tier = MODEL | {"tier": "flex"}
    assert grown[named("troupe_queue_seconds_sum", **tier)] == pytest.approx(sum(each["queue_s"] for each in timings))
    assert grown[named("troupe_predicted_seconds_sum", **MODEL)] == pytest.approx(sum(e["eta_s"] for e in timings))
    ratios = sum(each["total_s"] / each["eta_s"] for each in timings)
    assert grown[named("troupe_prediction_ratio_sum", **MODEL)] == pytest.approx(ratios)
    assert grown[named("troupe_deadlines_total", **MODEL, outcome="met")] == 3
    assert after[named("troupe_requests_open", **tier)] == 0
    encodings = [grown[named("troupe_encodings_total", **MODEL, source=source)] for source in ("kept", "encoded")]
    assert sum(encodings) == 3
    assert encodings[0] >= 2, "all said the same"
    steps = MODEL | {"num_ranks": "2"}
    assert grown[named("troupe_step_seconds_count", **steps)] == 12
    assert 0 < grown[named("troupe_step_seconds_sum", **steps)] <= sum(each["total_s"] for each in timings)
    assert grown[named("troupe_jobs_total", **MODEL, outcome="done")] == 3
    assert grown[named("troupe_cold_jobs_total", **MODEL)] == sum(not each["was_warm"] for each in timings)
    assert [grown[answers[status]] for status in ("200", "400")] == [3, 1]
    phases = [named("troupe_gang_start_phase_seconds_sum", **MODEL, phase=phase) for phase in PHASES]
    start_s = after[named("troupe_gang_start_seconds_sum", **MODEL)]
    assert min(after[phase] for phase in phases) > 0
    assert sum(after[phase] for phase in phases) <= start_s
    assert start_s > 0.1, "with processes that stood by; else it takes seconds"
    assert after[named("troupe_jobs_running", **MODEL)] == after[named("troupe_jobs_waiting", **MODEL)] == 0


def test_what_the_dashboard_names_is_there(url: str) -> None:
    families = {family.name: family.type for family in page()}
    series = {name + end for name, kind in families.items() for end in ENDS.get(kind, ("",))}
    named = set(re.findall(r"troupe_\w+", (ROOT / "deployments" / "observability" / "grafana.json").read_text()))
    assert len(named) > 10
    assert named - series == set()


def test_all_processes_are_told_apart(url: str) -> None:
    assert replicas_of(page()) == REPLICAS
