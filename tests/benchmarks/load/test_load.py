"""Arrivals are the requested ones, requests do not wait for each other, and the summary is right."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from pydantic import ValidationError

from benchmarks.load.__main__ import main, parse
from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import MIXES, Kind, Mix, RequestClass, bursts, load_mix, poisson, trace, trace_file
from benchmarks.load.summary import gpu_use, plot, print_classes, summary
from pipelines.request import ServiceTier
from tests.benchmarks.load.support.server import Server

MIX = Mix(classes=(RequestClass(name="a", share=3, body={"prompt": "a"}), RequestClass(name="b", kind="clip", body={})))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("twelve_small_behind_two_large", {"large": 2, "small": 12}),
        ("eight_at_once", {"usual": 8}),
        ("sixteen_at_once", {"usual": 16}),
    ],
)
def test_the_traces_that_lie_beside_are_of_the_pictures(name: str, expected: dict[str, int]) -> None:
    arrivals = trace(load_mix("pictures"), trace_file(name), seed=0)
    assert Counter(one.kind.name for one in arrivals) == expected
    assert [one.kind.name for one in arrivals] == sorted(one.kind.name for one in arrivals), "large ones first"


def test_unknown_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="known: eight_at_once, sixteen_at_once, twelve_small_behind_two_large"):
        trace_file("nine_at_once")


def test_poisson_has_the_rate_and_the_shares() -> None:
    arrivals = poisson(MIX, 50.0, 100.0, seed=1)
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    gaps = np.diff([one.at_s for one in arrivals])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "gaps are exponential"
    assert Counter(one.kind.name for one in arrivals)["a"] == pytest.approx(0.75 * len(arrivals), rel=0.05)
    assert arrivals == poisson(MIX, 50.0, 100.0, seed=1) != poisson(MIX, 50.0, 100.0, seed=2)


def test_bursts_come_at_once() -> None:
    assert [one.at_s for one in bursts(MIX, 2, 5.0, 10.0, seed=0)] == [0.0, 0.0, 5.0, 5.0]


def test_a_load_without_requests_is_refused_before_anything_is_started() -> None:
    with pytest.raises(SystemExit, match="no request comes in that time: raise --rate"):
        main(["--rate", "0.001", "--duration-s", "0.001"])


def test_a_trace_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{"at_s": 2, "class": "b"}\n{"at_s": 1.5}\n')
    assert [one.at_s for one in trace(MIX, file, seed=0)] == [1.5, 2.0]
    for wrong in ('{"at": 2}', '{"at_s": "2"}', '{"at_s": 1, "class": "c"}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"must be|there is no class 'c'; known: a, b"):
            trace(MIX, file, seed=0)


@pytest.mark.parametrize("name", [file.stem for file in MIXES.glob("*.yaml")])
def test_mixes_that_lie_there_are_read(name: str) -> None:
    assert load_mix(name).classes


def test_classes_of_the_tiers_differ_in_nothing_else() -> None:
    """So the tier causes the differences between their latencies."""
    bodies = [{**one.body} for one in load_mix("tiers").classes]
    assert {body.pop("service_tier") for body in bodies} == set(get_args(ServiceTier))
    assert all(body == bodies[0] for body in bodies)


def test_wrong_mixes_are_refused() -> None:
    one = {"name": "a", "body": {}}
    for classes in ([], [one, one], [{**one, "share": 0}], [{**one, "size": "64x64"}]):
        with pytest.raises(ValidationError):
            Mix.model_validate({"classes": classes})
    with pytest.raises(ValueError, match="known: laptop, pictures, tiers"):
        load_mix("nothing")


def test_requests_do_not_wait_for_answers(url: str) -> None:
    arrivals = bursts(MIX, 4, 0.1, 0.2, seed=1)
    Server.expected = len(arrivals)
    outcomes = asyncio.run(send_all(url, arrivals, {}))
    assert [one.name for one in outcomes] == [one.kind.name for one in arrivals]
    assert {one.status for one in outcomes if one.name == "a"} == {200}
    assert {one.status for one in outcomes if one.name == "b"} == {429}
    assert outcomes[0].stages_ms == {"queue": 2.5, "denoise": 5.0, "total": 10.0}
    assert outcomes[0].gpu_s == 0.125
    assert {(one.name, one.kind, one.num_media) for one in outcomes} == {("a", "picture", 1), ("b", "clip", 1)}
    assert {(one.name, one.eta_s) for one in outcomes} == {("a", 0.012), ("b", None)}
    assert all(one.eta_error == pytest.approx(0.2) for one in outcomes if one.name == "a")
    paths = Counter(path for path, _ in Server.seen)
    assert paths["/v1/videos/sync"] == Counter(one.name for one in outcomes)["b"]
    assert sorted(body["seed"] for _, body in Server.seen) == list(range(len(arrivals)))


def test_a_server_that_is_gone_is_an_outcome() -> None:
    (outcome,) = asyncio.run(send_all("http://127.0.0.1:9", bursts(MIX, 1, 1.0, 1.0, seed=0), {}))
    assert (outcome.status, outcome.is_right) == (0, False)


def outcomes() -> list[Outcome]:
    slow = [Outcome(name="a", at_s=float(n), late_s=0.0, latency_s=n + 1.0, status=200) for n in range(10)]
    return [*slow, Outcome(name="b", at_s=0.0, late_s=0.01, latency_s=0.1, status=429)]


def test_the_summary_counts_what_is_not_answered_as_late(tmp_path: Path) -> None:
    found = summary(outcomes(), {"a": 2.0, "b": 1.0, "never": 1.0}, scale=3.0)
    assert found["classes"]["a"]["attainment"] == 0.6
    assert found["classes"]["a"]["latency_s"] == {"mean": 5.5, "p50": 6.0, "p95": 10.0, "p99": 10.0}
    assert found["classes"]["b"] == {
        "kind": "picture",
        "requests": 1,
        "right": 0,
        "lone_s": 1.0,
        "latency_s": {},
        "gpu_s": {},
        "attainment": 0.0,
        "eta": {"told": 0},
    }
    assert set(found["classes"]) == {"a", "b"}
    assert found["attainment"] == round(6 / 11, 4)
    assert (found["statuses"], found["throughput_per_s"]) == ({"200": 10, "429": 1}, round(10 / 19, 4))
    path = tmp_path / "out" / "plot.png"
    plot(outcomes(), {"a": 2.0, "b": 1.0}, 3.0, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_gpu_seconds_are_told_by_class_for_a_picture_and_for_a_clip(capsys: pytest.CaptureFixture[str]) -> None:
    """Only right answers count. The four pictures of a request share its time."""
    pair = [spent("pictures", gpu_s, num_media=4) for gpu_s in (4.0, 8.0)]
    failed = spent("pictures", 100.0, status=502)
    found = summary([*pair, failed, spent("single", 0.5), spent("clip", 30.0, kind="clip")], LONE, scale=3.0)
    classes = found["classes"]
    assert classes["pictures"]["gpu_s"] == {"mean": 1.5, "p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert (classes["single"]["gpu_s"]["mean"], classes["clip"]["gpu_s"]["mean"]) == (0.5, 30.0)
    assert found["gpu_s"] == {"picture": round(12.5 / 9, 4), "clip": 30.0}
    print_classes(found)
    assert [line.split("  ")[-1] for line in capsys.readouterr().err.splitlines()] == [
        "1.50 GPU-s a picture",
        "0.50 GPU-s a picture",
        "30.00 GPU-s a clip",
    ]


LONE = {"pictures": 1.0, "single": 1.0, "clip": 1.0}


def spent(name: str, gpu_s: float, *, kind: Kind = "picture", num_media: int = 1, status: int = 200) -> Outcome:
    shared = {"name": name, "kind": kind, "num_media": num_media, "status": status, "gpu_s": gpu_s}
    return Outcome(at_s=0.0, late_s=0.0, latency_s=1.0, **shared)  # type: ignore[arg-type]


def test_predictions_are_told_beside_what_was() -> None:
    """Errors are relative to the server's own total, by class and in all. Answers without a prediction do not count."""
    told = [outcome("a", eta_s, total_ms=2000.0) for eta_s in (2.0, 1.0, 2.2, None)] + [outcome("b", 3.0, 2000.0)]
    found = summary([*told, outcome("b", 9.0, 1000.0, status=429)], {"a": 1.0, "b": 1.0}, scale=3.0)
    assert found["classes"]["a"]["eta"] == {"told": 3, "median_error": 0.1, "p95_error": 0.5}
    assert found["classes"]["b"]["eta"] == {"told": 1, "median_error": 0.5, "p95_error": 0.5}
    assert found["eta"] == {"told": 4, "median_error": 0.3, "p95_error": 0.5}


def outcome(name: str, eta_s: float | None, total_ms: float, status: int = 200) -> Outcome:
    stages_ms = {"total": total_ms}
    return Outcome(name=name, at_s=0.0, late_s=0.0, latency_s=2.0, status=status, stages_ms=stages_ms, eta_s=eta_s)


def test_a_server_that_runs_has_keys_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--url", "http://h", "--owners", "three"])
    assert "--url has its own" in capsys.readouterr().err
    for words in (["--owners", "nothing"], ["--trace", "nothing"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert "known: " in capsys.readouterr().err


def test_steps_of_a_team_count_for_all_of_its_ranks() -> None:
    registry = CollectorRegistry()
    steps = Histogram("troupe_step_seconds", "", ("model", "num_ranks"), registry=registry)

    def text() -> str:
        return generate_latest(registry).decode()

    steps.labels("one", 1).observe(5.0)
    before = text()
    steps.labels("one", 1).observe(1.0)
    steps.labels("one", 2).observe(2.0)
    found = gpu_use(before, text(), took_s=10.0, num_gpus=2, num_pictures=4)
    assert found == {"rank_s_per_request": 1.25, "share_in_steps": 0.25}
