"""``troupe status`` and ``troupe clips`` show a server that is real except for its models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from deployments.cli.operation import counts_of
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.commands import assert_one_line, troupe
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.live import TIMEOUT_S, wait_until

KEY = "a-key"
PAGE = """
# TYPE troupe_jobs_waiting gauge
troupe_jobs_waiting{model="fake-clips",replica="a"} 2.0
troupe_jobs_waiting{model="fake-clips",replica="b"} 1.0
troupe_jobs_waiting{model="fake-pictures",replica="c"} 0.0
# TYPE troupe_gangs gauge
troupe_gangs{model="fake-clips",replica="a"} 1.0
troupe_gangs{model="fake-clips",replica="b"} 1.0
"""


@pytest.fixture
def service() -> FakeService:
    return FakeService(step_s=0)


@pytest.fixture(params=["", "/v1", "/v1/"])
def url(service: FakeService, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(build(service, tmp_path, api_keys=(KEY,))) as url:
        yield f"{url}{request.param}"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEY", KEY)


def look(*args: str, url: str) -> str:
    result = troupe(*args, "--url", url)
    assert result.exit_code == 0, result.output
    return result.output


def cells(output: str) -> list[list[str]]:
    """Return the rows of a table, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_models_that_are_ready(url: str) -> None:
    output = look("status", url=url)
    assert "is ready" in output
    assert cells(output) == [
        ["fake-pictures", "image", "–", "–", "–", "ready"],
        ["fake-clips", "video", "–", "–", "–", "ready"],
    ]
    assert "No numbers of gangs and jobs" in output


def test_a_model_that_is_not(service: FakeService, url: str) -> None:
    service.reasons = {"fake-clips": "its gang is rebuilt [2 of 4]"}
    result = troupe("status", "--url", url)
    assert result.exit_code == 1
    assert "is not ready" in result.output
    assert cells(result.output)[1][-1] == "its gang is rebuilt [2 of 4]"


def test_what_gangs_do_is_read_where_the_metrics_are(service: FakeService, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    waiting = Gauge("troupe_jobs_waiting", "", ("model", "replica"), registry=registry)
    waiting.labels("fake-clips", "a").set(2)
    metrics, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with serving(build(service, tmp_path)) as url:
            result = troupe("status", "--url", url, "--metrics-url", f"http://127.0.0.1:{metrics.server_port}/metrics")
    finally:
        metrics.shutdown()
        metrics.server_close()
        thread.join()
    assert cells(result.output) == [
        ["fake-pictures", "image", "0", "0", "0", "ready"],
        ["fake-clips", "video", "0", "0", "2", "ready"],
    ]


def test_gangs_and_jobs_are_those_of_all_replicas() -> None:
    counts = counts_of(PAGE)
    assert counts == {"gangs": {"fake-clips": 2}, "running": {}, "waiting": {"fake-clips": 3, "fake-pictures": 0}}


def test_clips_are_listed_fetched_and_deleted(url: str, tmp_path: Path) -> None:
    root = url.partition("/v1")[0]
    with httpx.Client(base_url=root, headers={"Authorization": f"Bearer {KEY}"}, timeout=TIMEOUT_S) as client:
        posted = [client.post("/v1/videos", json={"prompt": f"[bold] {i} {'x' * 50}"}).json()["id"] for i in range(2)]
        wait_until(lambda: client.get("/v1/videos").text.count('"completed"') == 2, "both clips")
        content = client.get(f"/v1/videos/{posted[0]}/content").content
    newest, oldest = cells(look("clips", url=url))
    assert (newest[:3], oldest[:3]) == ([posted[1], "completed", "fake-clips"], [posted[0], "completed", "fake-clips"])
    assert newest[-1] == f"[bold] 1 {'x' * 30}…"
    assert [row[0] for row in cells(look("clips", "--limit", "1", url=url))] == [posted[1]]
    out = tmp_path / "deeper" / "clip.mp4"
    assert str(out) in look("clips", "--download", posted[0], "--out", str(out), url=url)
    assert out.read_bytes() == content
    assert posted[0] in look("clips", "--delete", posted[0], url=url)
    assert [row[0] for row in cells(look("clips", url=url))] == [posted[1]]
    assert_one_line(troupe("clips", "--delete", posted[0], "--url", url), posted[0])


def test_prompts_of_others_are_no_commands_to_the_terminal(url: str) -> None:
    root = url.partition("/v1")[0]
    with httpx.Client(base_url=root, headers={"Authorization": f"Bearer {KEY}"}, timeout=TIMEOUT_S) as client:
        client.post("/v1/videos", json={"prompt": "a\x1b[2J\ncircle"}).raise_for_status()
    assert cells(look("clips", url=url))[0][-1] == r"a\u001b[2J\u000acircle"


def test_who_has_no_key_sees_no_clips(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_API_KEY")
    assert_one_line(troupe("clips", "--url", url), "API key")
