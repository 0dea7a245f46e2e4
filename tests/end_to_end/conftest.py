"""One running application for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.conftest import clips, models, official, pictures
from tests.deployments.support.live import config_of, live

__all__ = ["clips", "models", "official", "pictures", "url"]

NUM_RUNNING = 3
NUM_WAITING = 60
MAX_BODY_BYTES = 100_000
STEP_DEADLINE_S = 5.0
"""What a test waits for that stops a rank."""
METRICS_PORT = 19464
METRICS_URL = f"http://127.0.0.1:{METRICS_PORT}/metrics"
WARM_SIZE = "96x32"
"""Prepared at start; only the test of that asks for it."""


@pytest.fixture(scope="package")
def url(ray_cluster: None, models: dict[str, Path]) -> Iterator[str]:
    denoiser = {"max_running_jobs": NUM_RUNNING, "max_waiting_jobs": NUM_WAITING, "step_deadline_s": STEP_DEADLINE_S}
    api = {"max_body_bytes": MAX_BODY_BYTES}
    config = config_of(models, api=api, warm_sizes=[WARM_SIZE], **denoiser).with_metrics(METRICS_PORT)
    with live(config) as url:
        yield url
