"""Work for clients that disconnect is reported by the gang and counted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.support.live import SMALL, TIMEOUT_S, stream_of, wait_until
from tests.end_to_end.conftest import CLIPS, LONG_CLIP, LONGEST, METRICS_URL, PICTURES

STEPS_SEEN = 5


def usage(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/usage", timeout=TIMEOUT_S).json()
    return answer


def billed_s(model: str) -> float:
    """Return the metrics' seconds of ranks in billed steps."""
    lines = httpx.get(METRICS_URL, timeout=TIMEOUT_S).text.splitlines()
    own = (line for line in lines if line.startswith("troupe_gpu_seconds_total{") and f'model="{model}"' in line)
    return sum(float(line.split()[-1]) for line in own)


def assert_grows(url: str, before: dict[str, Any], counted_before: float, model: str) -> None:
    """Check that usage grows by at least the seen steps, and not as a finished request."""
    wait_until(lambda: usage(url)["gpu_seconds"] > before["gpu_seconds"], "the work is counted")
    after = usage(url)
    assert after["num_requests"] == before["num_requests"]
    spent_s = after["gpu_seconds"] - before["gpu_seconds"]
    assert billed_s(model) - counted_before == pytest.approx(spent_s, abs=0.01)


async def test_a_picture_that_is_left(url: str) -> None:
    before, counted_before = usage(url), billed_s(PICTURES)
    async with httpx.AsyncClient(base_url=url) as client:
        body = SMALL | {"size": "256x256", "num_inference_steps": LONGEST}
        async with stream_of(client, body) as events:
            async for event in events:
                if event["step"] >= STEPS_SEEN:
                    break
    assert_grows(url, before, counted_before, PICTURES)


def test_a_clip_that_is_deleted(url: str) -> None:
    before, counted_before = usage(url), billed_s(CLIPS)
    asked = {"model": CLIPS, "prompt": "a red circle", **LONG_CLIP}
    clip = httpx.post(f"{url}/v1/videos", json=asked, timeout=TIMEOUT_S).json()["id"]
    wait_until(lambda: httpx.get(f"{url}/v1/videos/{clip}", timeout=TIMEOUT_S).json()["progress"] > 3, "it is made")
    httpx.delete(f"{url}/v1/videos/{clip}", timeout=TIMEOUT_S)
    assert_grows(url, before, counted_before, CLIPS)
