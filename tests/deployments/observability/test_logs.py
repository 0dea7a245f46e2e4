"""Log lines are JSON, with the request's id in every task of it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.observability.logs import configure_logs, request_context
from pipelines.request import MediaRequest
from tests.deployments.http.conftest import build
from tests.deployments.support.fake_service import FakeService

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("troupe")
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure_logs(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.handlers[:], logger.level, logger.propagate = before


def test_fields(lines: Lines) -> None:
    with request_context("r1"):
        logging.getLogger("troupe.x").warning("%d\nlines", 2, extra={"model": "m", "object": object})
    logging.getLogger("troupe.x").debug("too quiet")
    (line,) = lines()
    assert (line["level"], line["logger"], line["message"], line["request_id"]) == (
        "warning",
        "troupe.x",
        "2\nlines",
        "r1",
    )
    assert (line["model"], line["time"][-6:]) == ("m", "+00:00")


def test_exception_and_no_request(lines: Lines) -> None:
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("troupe").exception("failed")
    (line,) = lines()
    assert "KeyError: 'k'" in line["exception"]
    assert "request_id" not in line


async def test_tasks_keep_their_request(lines: Lines) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        logging.getLogger("troupe.x").info("working")

    tasks = []
    for name in ("a", "b"):
        with request_context(name):
            tasks.append(asyncio.create_task(work()))
    await asyncio.gather(*tasks)
    assert sorted(line["request_id"] for line in lines()) == ["a", "b"]


async def test_access_log(lines: Lines, tmp_path: Path) -> None:
    def fail(request: MediaRequest) -> None:
        raise RuntimeError("broken")

    app = build(FakeService(before=fail), tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        await client.get("/health", headers={"X-Request-Id": "mine"})
        await client.post("/v1/images/generations", json={"prompt": "a"}, headers={"X-Request-Id": "bad"})
    health, error, access = lines()
    assert (health["logger"], health["request_id"], health["status"], health["path"]) == (
        "troupe.access",
        "mine",
        200,
        "/health",
    )
    assert health["duration_ms"] >= 0
    assert (error["request_id"], error["level"]) == ("bad", "error")
    assert "RuntimeError: broken" in error["exception"]
    assert (access["request_id"], access["status"], access["method"]) == ("bad", 500, "POST")


async def test_health_is_logged_when_the_answer_changes(lines: Lines, tmp_path: Path) -> None:
    service = FakeService(reasons={"fake-pictures": "starting"})
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build(service, tmp_path)), base_url="http://localhost"
    ) as client:
        for reasons in ({"fake-pictures": "starting"}, {}, {"fake-pictures": "lost"}):
            service.reasons = reasons
            for _ in range(3):
                await client.get("/health")
                await client.get("/v1/models")
        await client.get("/health", headers={"Host": "elsewhere.example"})
        await client.get("/health", headers={"Host": "elsewhere.example"})
    said = [line["status"] for line in lines() if line["path"] == "/health"]
    assert said == [503, 200, 503, 403, 403]
    assert sum(line["path"] == "/v1/models" for line in lines()) == 9
