"""HTTP client for pictures and clips, and the milliseconds by stage that answers report."""

from __future__ import annotations

import base64
import io
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from PIL import Image

from benchmarks.results import Spread
from deployments.cli.local import uses_proxies

IMAGES, EDITS, CLIPS = "/v1/images/generations", "/v1/images/edits", "/v1/videos/sync"
PROMPT = "a small red circle above a large blue square on a white background"
STAGES = ("queue", "encode", "denoise", "decode", "total")
TIMEOUT_S = 1200.0
"""A long clip takes minutes, and its first one longer."""

Timing = Mapping[str, float]
"""Milliseconds by stage."""


class Client(httpx.Client):
    """Asks the application at ``url`` for pictures of ``side`` x ``side`` pixels (0: the model's size) and for clips.

    ``model`` is one of several. RuntimeError for what is not made.
    """

    def __init__(self, url: str, side: int = 0, model: str = "") -> None:
        super().__init__(base_url=url, timeout=TIMEOUT_S, trust_env=uses_proxies(url))
        self.side, self.model = side, model
        self._usual = {"prompt": PROMPT, "seed": 1, **({"model": model} if model else {})}

    def card(self) -> Mapping[str, Any]:
        """Return the description of the model: ``id``, ``kind`` (image or video), ``defaults``, ``recipes``."""
        cards = self.get("/v1/models").raise_for_status().json()["data"]
        return next(card for card in cards if self.model in ("", card["id"]))

    def make(self, kind: str, pictures: Sequence[bytes] = (), **fields: Any) -> httpx.Response:
        """Return a picture or a clip ("video"), once it is made; ``pictures`` are the files that it is made of."""
        is_clip, body = kind == "video", {**self._usual, **fields}
        if not pictures:
            return checked(self.post(CLIPS if is_clip else IMAGES, json=body))
        name, text = "input_reference" if is_clip else "image", {key: str(value) for key, value in body.items()}
        files = [(name, (f"{number}.png", file, "image/png")) for number, file in enumerate(pictures)]
        return checked(self.post(CLIPS if is_clip else EDITS, data=text, files=files))

    def paint(self, **fields: Any) -> httpx.Response:
        size = {"size": _square(self.side)} if self.side else {}
        return self.make("image", **{**size, **fields})

    def film(self, **fields: Any) -> httpx.Response:
        return self.make("video", **fields)

    def paint_square(self, side: int) -> httpx.Response:
        return self.paint(size=_square(side))

    def edit(self) -> httpx.Response:
        """Return an edited picture of noise."""
        return self.make("image", [noise(self.side, self.side)], size=_square(self.side))

    def paint_each(
        self, bodies: Sequence[Mapping[str, Any]], num_clients: int
    ) -> tuple[float, list[tuple[float, httpx.Response]]]:
        """Send ``num_clients`` requests at a time. Return the seconds of all, and each answer with its seconds."""

        def ask(body: Mapping[str, Any]) -> tuple[float, httpx.Response]:
            begin_s = time.perf_counter()
            answer = self.paint(**body)
            return time.perf_counter() - begin_s, answer

        with ThreadPoolExecutor(num_clients) as pool:
            start_s = time.perf_counter()
            answers = list(pool.map(ask, bodies))
            return time.perf_counter() - start_s, answers


def _square(side: int) -> str:
    return f"{side}x{side}"


def noise(width: int, height: int) -> bytes:
    """Return a PNG file, the same at each call."""
    file = io.BytesIO()
    pixels = random.Random(1).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"no picture or clip, but {answer.status_code}: {answer.text[:1000]}")
    return answer


def data_of(answer: httpx.Response) -> bytes:
    """Return the bytes of a picture's file, or a clip's."""
    if answer.headers.get("content-type", "").startswith("video/"):
        return answer.content
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def timing(answer: httpx.Response) -> Timing:
    """Return the stages of the answer's ``Server-Timing``."""
    return stages_ms(answer.headers["server-timing"])


def stages_ms(header: str) -> dict[str, float]:
    """Return the milliseconds by stage of a ``Server-Timing`` header. An empty header has none."""
    entries = (entry.strip().split(";dur=") for entry in header.split(",") if entry)
    return {name: float(value) for name, value in entries}


def medians(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return median and spread of each stage and of the whole."""
    return {stage: Spread.of([one[stage] for one in timings]).rounded(1) for stage in STAGES}


def last_event(response: httpx.Response, at_step: Callable[[int], None]) -> dict[str, Any]:
    """Read a stream of events, and call ``at_step`` with each step. Return the last event; {} without any."""
    event: dict[str, Any] = {}
    for line in response.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "troupe.progress":
                at_step(event["step"])
    return event
