"""Streams of events, as clients read them."""

from __future__ import annotations

import json
from typing import Any

import httpx


def sse(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Returns the events of a stream that was read to its end, by the rules of the HTML standard. AssertionError, with
    status and body, for an answer that is none."""
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    assert is_stream, f"an answer that is no stream of events, but {answer.status_code}: {answer.text}"
    events = []
    for block in answer.text.split("\n\n"):
        fields = [line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            data = "\n".join(value for name, value in fields if name == "data")
            events.append((dict(fields)["event"], json.loads(data)))
    return events
