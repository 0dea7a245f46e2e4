"""Urgency goes in as fields; the predicted end and the time taken come out as headers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engines.gang.errors import QueueFullError, TooLateError
from pipelines.request import MediaRequest
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.support.fake_service import ETA_S, GPU_S, FakeService


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ("default", None)),
        ({"service_tier": "auto"}, ("default", None)),
        ({"service_tier": "flex", "deadline_s": 90}, ("flex", 90.0)),
        ({"service_tier": "priority", "deadline_s": 2.5}, ("priority", 2.5)),
    ],
)
async def test_what_the_service_hears(
    client: httpx.AsyncClient, service: FakeService, body: dict[str, Any], expected: tuple[str, float | None]
) -> None:
    assert (await client.post(IMAGES, json={"prompt": "a", **body})).status_code == 200
    (request,) = service.performed
    assert (request.service_tier, request.deadline_s, request.key) == (*expected, "")


@pytest.mark.parametrize(
    ("name", "value"), [("service_tier", "scale"), ("deadline_s", 0), ("deadline_s", -1), ("deadline_s", "soon")]
)
async def test_what_is_no_urgency(client: httpx.AsyncClient, name: str, value: object) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_headers_tell_what_was_predicted_and_what_it_took(client: httpx.AsyncClient) -> None:
    """For two pictures they are the later end, and the work of both."""
    answer = await client.post(IMAGES, json={"prompt": "a", "n": 2, "seed": 1})
    assert answer.headers["X-Troupe-Eta"] == f"{ETA_S + 2:.3f}"
    assert answer.headers["X-Troupe-Gpu-Seconds"] == f"{2 * GPU_S:.3f}"


async def test_a_stream_tells_at_its_start_what_is_predicted(client: httpx.AsyncClient) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", "seed": 3, "stream": True, "stream_progress": True})
    assert answer.headers["X-Troupe-Eta"] == f"{ETA_S + 3:.3f}"
    assert "troupe.progress" in answer.text


@pytest.mark.parametrize("promised", [False, True])
async def test_what_an_elastic_gang_cannot_promise_is_said(
    client: httpx.AsyncClient, service: FakeService, promised: bool
) -> None:
    service.same_bytes = promised
    answer = await client.post(IMAGES, json={"prompt": "a"})
    assert answer.headers["X-Troupe-Same-Bytes"] == str(promised).lower()
    clip = await finished(client, (await make(client))["id"])
    assert clip["timings"]["same_bytes"] is promised


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_predicted_before_anything_was_measured(
    client: httpx.AsyncClient, service: FakeService, stream: bool
) -> None:
    service.knows_times = False
    body = {"stream": True, "stream_progress": True} if stream else {}
    answer = await client.post(IMAGES, json={"prompt": "a", **body})
    assert answer.status_code == 200
    assert "X-Troupe-Eta" not in answer.headers
    assert not stream or '"eta_s":null' in answer.text.replace(" ", "")


async def test_a_deadline_counts_from_when_the_request_came(client: httpx.AsyncClient, service: FakeService) -> None:
    """A clip's count starts when it was requested, however long it is queued."""
    assert (await client.post(IMAGES, json={"prompt": "a", "deadline_s": 9})).status_code == 200
    (picture,) = service.performed
    assert (picture.deadline_s, picture.waited_s > 0) == (9, True)
    refusals = [QueueFullError(1, retry_after_s=0.05)]

    def refuse_once(request: MediaRequest, step: int) -> None:  # like a lost gang whose successor is full
        if refusals:
            raise refusals.pop()

    service.at_step = refuse_once
    await finished(client, (await make(client, deadline_s=9))["id"])
    _, refused, taken = service.performed
    assert taken.deadline_s == refused.deadline_s == 9
    assert taken.waited_s - refused.waited_s > 0.05


def refuse(request: MediaRequest) -> None:
    raise TooLateError(3, 7.2, 16.2, "deadline_s", 9.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_would_be_late_is_refused(client: httpx.AsyncClient, service: FakeService, stream: bool) -> None:
    service.before = refuse
    answer = await client.post(IMAGES, json={"prompt": "a", "deadline_s": 9, "stream": stream})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "8")
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("too_late", "rate_limit_error")
    assert "16.2 s" in error["message"]


LONGEST_WAIT = TooLateError(3, 0.05, 16.2, "the longest wait, max_wait_s,", 9.0)


async def test_what_would_wait_longer_than_it_may_is_refused(client: httpx.AsyncClient, service: FakeService) -> None:
    """The server sets the limit; a request has no such field."""

    def refuse_wait(request: MediaRequest) -> None:
        raise LONGEST_WAIT

    service.before = refuse_wait
    answer = await client.post(IMAGES, json={"prompt": "a"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("too_late", "rate_limit_error")
    assert "about 16.2 s, and the longest wait, max_wait_s, is 9" in error["message"]


async def test_a_clip_waits_in_the_records_until_its_gang_takes_it(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    refusals = [LONGEST_WAIT, LONGEST_WAIT]

    def refuse_twice(request: MediaRequest) -> None:
        if refusals:
            raise refusals.pop()

    service.before = refuse_twice
    clip = await finished(client, (await make(client))["id"])
    assert clip["status"] == "completed"
    assert len(service.performed) == 3
