"""The messages of a starting application are shown."""

from __future__ import annotations

import httpx
import pytest

from deployments.cli import serving

READY = {"models": {"a": "ready"}}
STARTING = {"models": {"a": "ready", "b": "gang: weights"}}
DOOR = {"error": {"message": "the server is gone", "code": "server_lost"}}


def answering(status: int, document: object) -> httpx.Client:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=document)

    return httpx.Client(base_url="http://troupe", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (200, READY, ""),
        (503, STARTING, "gang: weights"),
        (503, DOOR, "the application is starting"),
        (502, DOOR, "the application is starting"),
        (504, DOOR, "the application is starting"),
    ],
)
def test_what_passes_is_waited_for(status: int, document: object, reason: str) -> None:
    assert serving._not_ready(answering(status, document)) == reason


def test_another_server_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="GET /health answered 404"):
        serving._not_ready(answering(404, {"detail": "Not Found"}))
