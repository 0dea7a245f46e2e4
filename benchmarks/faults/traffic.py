"""Clients that go on asking while processes die, and what became of each request."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from deployments.cli.local import http_client, uses_proxies

Outcome = Literal["right", "wrong_bytes", "refused", "error", "outside_shape"]
"""``refused``: no connection, or one that ended without an answer. ``error``: an answer in OpenAI's shape."""

NUM_SEEDS = 4
PROMPTS = {"image": "a red circle", "video": "a green triangle moves from left to right on a black background"}
TIMEOUT_S = 600.0
PAUSE_S, HEALTH_EVERY_S = 0.5, 0.2
IMAGES = "/v1/images/generations"
MAX_CHARS = 300


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
        response = client.post(IMAGES, json={"prompt": PROMPTS["image"], "seed": seed})
        if response.status_code != httpx.codes.OK:
            return judged(response)
        return self._compared("image", seed, base64.b64decode(response.json()["data"][0]["b64_json"]))

    def _stream(self, client: httpx.Client, seed: int) -> tuple[Outcome, str]:
        body = {"prompt": PROMPTS["image"], "seed": seed, "stream": True, "partial_images": 2}
        with client.stream("POST", IMAGES, json=body) as response:
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


@dataclass(kw_only=True, slots=True)
class Answer:
    """What a client saw: the failures before its picture, and when it had it (None: never)."""

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
        body = {"model": self.model, "prompt": PROMPTS["image"], "seed": 1, "num_inference_steps": num_steps}
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
    event: dict[str, Any] = {}
    wanted = {**body, "stream": True, "stream_progress": True}
    with client.stream("POST", IMAGES, json=wanted, timeout=timeout_s) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
        _raise_if_refused(response)
        for line in response.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "troupe.progress":
                    at_step(event["step"])
    if event.get("type") != "image_generation.completed":
        raise RefusedError(f"stream ends after {event.get('type')}", json.dumps(event)[:MAX_CHARS])
    return base64.b64decode(event["b64_json"])


@dataclass(kw_only=True, slots=True)
class Health:
    """What ``GET /health`` answers, by when."""

    url: str
    looks: list[tuple[float, int]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def outages(self, since_s: float) -> list[tuple[float, float]]:
        """Return from when to when it was not 200; the last one may go on."""
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

    def _look(self, over: threading.Event) -> None:
        with http_client(self.url, base_url=self.url, timeout=2.0) as client:
            while not over.wait(HEALTH_EVERY_S):
                began_s, status = time.monotonic(), 0
                with suppress(httpx.TransportError):
                    status = client.get("/health").status_code
                self.looks.append((began_s, status))
