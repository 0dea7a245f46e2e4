"""Clients that ask again until they have their picture, and looks at ``/health``, while a fault strikes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.application.client import IMAGES, last_event
from benchmarks.application.memory import samples_of
from deployments.cli.local import http_client

PROMPT = "a red circle"
PAUSE_S, HEALTH_EVERY_S = 0.5, 0.2
MAX_CHARS = 300


@dataclass(kw_only=True, slots=True)
class Answer:
    """Answers to one client: the failures before its picture, and the time of the picture (None: never)."""

    refusals: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    """The body of the first failure of each kind."""
    data: bytes = b""
    ended_s: float | None = None

    def text(self, reference: bytes) -> str:
        end = "none" if self.ended_s is None else "right" if self.data == reference else "wrong bytes"
        return ", then ".join((*dict.fromkeys(self.refusals), end))


class RefusedError(Exception):
    """A request that ended without a picture: what the table calls it, and the answer's body."""

    def __init__(self, name: str, body: str) -> None:
        super().__init__(name)
        self.name, self.body = name, body


@dataclass(frozen=True, kw_only=True, slots=True)
class InsistentClient:
    """Asks ``url`` for a picture of ``model``, again and again until it is there."""

    url: str
    model: str

    def picture(self, num_steps: int, until_s: float, at_step: Callable[[int], None] | None = None) -> Answer:
        """Return the answer. With ``at_step``, which gets each step as it is seen, the picture is streamed."""
        body = {"model": self.model, "prompt": PROMPT, "seed": 1, "num_inference_steps": num_steps}
        answer = Answer()
        with http_client(self.url, base_url=self.url) as client:
            while (left_s := until_s - time.monotonic()) > 0:
                try:
                    answer.data = _ask(client, body, left_s, at_step)
                    answer.ended_s = time.monotonic()
                    return answer
                except RefusedError as refusal:
                    answer.refusals.append(refusal.name)
                    answer.said.setdefault(refusal.name, refusal.body)
                except httpx.TransportError as failure:
                    answer.refusals.append(f"no answer ({type(failure).__name__})")
                time.sleep(PAUSE_S)
        return answer


def _raise_if_refused(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    code = ""
    with suppress(ValueError, KeyError, TypeError):
        code = f" {response.json()['error']['code']}"
    raise RefusedError(f"{response.status_code}{code}", response.text[:MAX_CHARS])


def _ask(
    client: httpx.Client, body: Mapping[str, Any], timeout_s: float, at_step: Callable[[int], None] | None
) -> bytes:
    if at_step is None:
        response = client.post(IMAGES, json=body, timeout=timeout_s)
        _raise_if_refused(response)
        return base64.b64decode(response.json()["data"][0]["b64_json"])
    wanted = {**body, "stream": True, "stream_progress": True}
    with client.stream("POST", IMAGES, json=wanted, timeout=timeout_s) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
        _raise_if_refused(response)
        event = last_event(response, at_step)
    if event.get("type") != "image_generation.completed":
        raise RefusedError(f"stream ends after {event.get('type')}", json.dumps(event)[:MAX_CHARS])
    return base64.b64decode(event["b64_json"])


@dataclass(kw_only=True, slots=True)
class Health:
    """Answers of ``GET /health`` over time."""

    url: str
    looks: list[tuple[float, int]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with (
            http_client(self.url, base_url=self.url, timeout=2.0) as client,
            samples_of(lambda: self._look(client), HEALTH_EVERY_S),
        ):
            yield

    def outages(self, since_s: float) -> list[tuple[float, float]]:
        """Return begin and end of each time without a 200; the last one may go on."""
        found: list[tuple[float, float]] = []
        is_well = True
        for at_s, status in self.looks:
            if status == httpx.codes.OK:
                if not is_well:
                    found[-1] = (found[-1][0], at_s - since_s)
            elif is_well:
                found.append((at_s - since_s, self.looks[-1][0] - since_s))
            is_well = status == httpx.codes.OK
        return found

    def _look(self, client: httpx.Client) -> None:
        began_s, status = time.monotonic(), 0
        with suppress(httpx.TransportError):
            status = client.get("/health").status_code
        self.looks.append((began_s, status))
