"""Clients that go on asking while processes die, and what became of each request."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from deployments.cli.local import uses_proxies

Outcome = Literal["right", "wrong_bytes", "refused", "error", "outside_shape"]
"""``refused``: no connection, or one that ended without an answer. ``error``: an answer in OpenAI's shape."""

NUM_SEEDS = 4
PROMPTS = {"image": "a red circle", "video": "a green triangle moves from left to right on a black background"}
TIMEOUT_S = 600.0
PAUSE_S = 0.5


@dataclass(kw_only=True, slots=True)
class Tally:
    """What was seen, filled by several threads. A request over ``hang_s`` counts as hung, however it ended."""

    hang_s: float
    outcomes: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    clips: dict[str, int] = field(default_factory=dict)
    """Seeds of the clips that the server took, by id."""

    def note(self, kind: str, outcome: Outcome, took_s: float, what: str = "") -> None:
        self.outcomes[f"{kind} {outcome}"] += 1
        if took_s > self.hang_s:
            self.hangs.append(f"{kind}: {took_s:.0f} s")
        if outcome in ("wrong_bytes", "outside_shape") or (outcome == "error" and len(self.examples) < 20):
            self.examples.append(f"{kind} {outcome}: {what[:300]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Asks ``url`` for pictures, streams and clips. ``references`` are the bytes of each kind's seeds."""

    url: str
    tally: Tally
    references: dict[tuple[str, int], bytes]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=uses_proxies(self.url))

    def picture(self, seed: int) -> None:
        self._attempt("picture", lambda client: self._picture(client, seed))

    def stream(self, seed: int) -> None:
        self._attempt("stream", lambda client: self._stream(client, seed))

    def clip(self, seed: int) -> None:
        self._attempt("clip", lambda client: self._clip(client, seed))

    def go_on(self, until: threading.Event, ask: Callable[[int], None]) -> None:
        seed = 0
        while not until.is_set():
            ask(seed % NUM_SEEDS)
            seed += 1
            until.wait(PAUSE_S)

    def _attempt(self, kind: str, ask: Callable[[httpx.Client], tuple[Outcome, str]]) -> None:
        started_s = time.monotonic()
        try:
            with self.client() as client:
                outcome, what = ask(client)
        except httpx.TransportError as failure:
            outcome, what = "refused", repr(failure)
        self.tally.note(kind, outcome, time.monotonic() - started_s, what)

    def _picture(self, client: httpx.Client, seed: int) -> tuple[Outcome, str]:
        response = client.post("/v1/images/generations", json={"prompt": PROMPTS["image"], "seed": seed})
        if response.status_code != httpx.codes.OK:
            return judged(response)
        return self._compared("image", seed, base64.b64decode(response.json()["data"][0]["b64_json"]))

    def _stream(self, client: httpx.Client, seed: int) -> tuple[Outcome, str]:
        body = {"prompt": PROMPTS["image"], "seed": seed, "stream": True, "partial_images": 2}
        with client.stream("POST", "/v1/images/generations", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                return judged(response)
            event: dict[str, Any] = {}
            for line in response.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
        if event.get("type") == "error":
            return ("error" if in_shape(event) else "outside_shape"), json.dumps(event)
        if event.get("type") != "image_generation.completed":
            return "refused", f"the stream ended after {event.get('type')}"
        return self._compared("image", seed, base64.b64decode(event["b64_json"]))

    def _clip(self, client: httpx.Client, seed: int) -> tuple[Outcome, str]:
        response = client.post("/v1/videos", json={"prompt": PROMPTS["video"], "seed": seed})
        if response.status_code != httpx.codes.OK:
            return judged(response)
        self.tally.clips[response.json()["id"]] = seed
        return "right", ""

    def _compared(self, kind: str, seed: int, data: bytes) -> tuple[Outcome, str]:
        is_right = self.references.setdefault((kind, seed), data) == data
        return ("right", "") if is_right else ("wrong_bytes", f"{kind} of seed {seed}")

    def clip_of(self, video_id: str, until_s: float) -> str:
        """What became of a clip: right, wrong_bytes, or why it is lost. Polls until ``until_s`` at most."""
        said = "no answer"
        with self.client() as client:
            while time.monotonic() < until_s:
                try:
                    record = client.get(f"/v1/videos/{video_id}")
                    said = record.text[:300]
                    status = record.json().get("status") if record.status_code == httpx.codes.OK else None
                    if status == "completed":
                        data = client.get(f"/v1/videos/{video_id}/content").raise_for_status().content
                        return self._compared("video", self.tally.clips[video_id], data)[0]
                    if status == "failed" or record.status_code == httpx.codes.NOT_FOUND:
                        return said
                except (httpx.HTTPError, ValueError) as failure:
                    said = repr(failure)
                time.sleep(PAUSE_S)
        return said


def judged(response: httpx.Response) -> tuple[Outcome, str]:
    try:
        body = response.json()
    except ValueError:
        body = None
    outcome: Outcome = (
        "error" if in_shape(body) and response.status_code >= httpx.codes.BAD_REQUEST else "outside_shape"
    )
    return outcome, f"{response.status_code} {response.text}"


def in_shape(body: object) -> bool:
    """Whether it is OpenAI's error body."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys()
