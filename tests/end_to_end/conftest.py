"""One running application for all tests of this folder: the laptop's, with limits that a test can reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from tests.deployments.conftest import official
from tests.deployments.support.live import live
from tests.support.fenced import ROOT
from tests.support.ports import own_port

__all__ = ["models", "official", "url"]

PICTURES, CLIPS, EDITS = "flux-shapes", "wan-shapes", "kontext-shapes"
SMALL_CLIP = {"size": "32x32", "num_frames": 9, "num_inference_steps": 6}
LONGEST = 100
"""Steps, as many as the models allow."""
LONG_CLIP = {"size": "96x96", "num_frames": 33, "num_inference_steps": LONGEST}
"""No such clip ends by itself while a test looks at it."""
NUM_RUNNING = 3
NUM_WAITING = 60
MAX_BODY_BYTES = 100_000
PING_DEADLINE_S = 12.0
"""What a test waits for that stops a rank; one that waits for a core is not to be taken for one that was stopped."""
METRICS_PORT = own_port("metrics of the application")
METRICS_URL = f"http://127.0.0.1:{METRICS_PORT}/metrics"
WARM_SIZE = "96x32"
"""Prepared at start; only the test of that asks for it."""


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    return {name: ROOT / "pipelines" / "checkpoints" / name for name in (PICTURES, CLIPS, EDITS)}


@pytest.fixture(scope="package")
def url(ray_cluster: None) -> Iterator[str]:
    with live(config()) as url:
        yield url


def config() -> ServeConfig:
    document = load_config("laptop").with_http(port=0).with_metrics(METRICS_PORT).model_dump(mode="json")
    limits = {"max_running_jobs": NUM_RUNNING, "max_waiting_jobs": NUM_WAITING, "ping_deadline_s": PING_DEADLINE_S}
    args = document["applications"][0]["args"]
    args["api"]["max_body_bytes"] = MAX_BODY_BYTES
    for model in args["models"]:
        model["denoiser"] |= limits | {"warm_sizes": [WARM_SIZE]}
    return parse_config(document)
