"""Read streams of events, like clients."""

from __future__ import annotations

import json
from typing import Any

import httpx


def sse(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a complete stream, by the rules of the HTML standard. Raise AssertionError, with status and
    body, for another answer."""
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    assert is_stream, f"an answer that is no stream of events, but {answer.status_code}: {answer.text}"
    events = []
    for block in answer.text.split("\n\n"):
        fields = [line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            data = "\n".join(value for name, value in fields if name == "data")
            events.append((dict(fields)["event"], json.loads(data)))
    return events
