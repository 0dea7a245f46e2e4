"""Pictures and clips over HTTP, and the milliseconds that their answers say they took."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from PIL import Image

from benchmarks.serving.clients import STAGES, stages_ms
from benchmarks.spread import Spread
from deployments.cli.local import uses_proxies

IMAGES, EDITS, CLIPS = "/v1/images/generations", "/v1/images/edits", "/v1/videos/sync"
PROMPT = "a small red circle above a large blue square on a white background"
TIMEOUT_S = 1200.0
"""A long clip takes minutes, and its first one longer."""

Timing = Mapping[str, float]
"""Milliseconds by stage."""


class Client(httpx.Client):
    """Asks the application at ``url`` for square pictures of ``side`` pixels, and for clips. RuntimeError for what is
    not made."""

    def __init__(self, url: str, side: int) -> None:
        super().__init__(base_url=url, timeout=TIMEOUT_S, trust_env=uses_proxies(url))
        self.side = side

    def painted(self, **fields: Any) -> httpx.Response:
        return _right(self.post(IMAGES, json={"prompt": PROMPT, "seed": 1, "size": _square(self.side), **fields}))

    def painted_square(self, side: int) -> httpx.Response:
        return self.painted(size=_square(side))

    def filmed(self, **fields: Any) -> httpx.Response:
        """A clip, once it is there."""
        return _right(self.post(CLIPS, json={"prompt": PROMPT, "seed": 1, **fields}))

    def edited(self) -> httpx.Response:
        """A picture of the same size comes along."""
        file = io.BytesIO()
        Image.effect_noise((self.side, self.side), 60).convert("RGB").save(file, "PNG")
        return _right(
            self.post(
                EDITS,
                data={"prompt": PROMPT, "seed": "1", "size": _square(self.side)},
                files={"image": ("noise.png", file.getvalue(), "image/png")},
            )
        )


def _square(side: int) -> str:
    return f"{side}x{side}"


def _right(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"no picture or clip, but {answer.status_code}: {answer.text[:1000]}")
    return answer


def data_of(answer: httpx.Response) -> bytes:
    """Of a picture's file, or a clip's."""
    if answer.headers.get("content-type", "").startswith("video/"):
        return answer.content
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def timing(answer: httpx.Response) -> Timing:
    """Of the answer's own ``Server-Timing``."""
    return stages_ms(answer.headers["server-timing"])


def medians(timings: Sequence[Timing]) -> dict[str, Any]:
    """Median and spread of each stage, and of the whole."""
    return {stage: Spread.of([one[stage] for one in timings]).rounded(1) for stage in STAGES}
