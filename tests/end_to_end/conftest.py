"""One running application for all tests of this folder: the laptop's, with limits that a test can reach."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from tests.deployments.conftest import official
from tests.deployments.support.chat_endpoint import ChatEndpoint, chat_endpoint
from tests.deployments.support.live import live
from tests.support.fenced import ROOT
from tests.support.ports import own_port

__all__ = ["models", "official", "url"]

PICTURES, CLIPS, EDITS = "flux-shapes", "wan-shapes", "kontext-shapes"
RECIPE = f"{PICTURES}:four-steps"
"""A recipe is listed as a model of its own."""
NUM_STEPS = 8
DEFAULTS = {
    PICTURES: {"num_inference_steps": NUM_STEPS},
    CLIPS: {"num_inference_steps": NUM_STEPS, "num_frames": 9},
    EDITS: {"num_inference_steps": NUM_STEPS},
}
SMALL_CLIP = {"size": "32x32", "num_frames": 9, "num_inference_steps": 6}
LONGEST = 100
"""The most steps that the models allow."""
LONG_CLIP = {"size": "96x96", "num_frames": 33, "num_inference_steps": LONGEST}
"""No such clip ends by itself during a test."""
NUM_RUNNING = 3
NUM_WAITING = 60
MAX_BODY_BYTES = 100_000
PING_DEADLINE_S = 12.0
"""Time that a test waits after stopping a rank; a rank that waits for a core must not count as stopped."""
METRICS_PORT = own_port("metrics of the application")
METRICS_URL = f"http://127.0.0.1:{METRICS_PORT}/metrics"
WARM_SIZE = "96x32"
"""Warmed up at start; only its own test requests it."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the shipped models, with defaults of fewer steps and frames."""
    return {
        name: with_defaults(ROOT / "pipelines" / "checkpoints" / name, tmp_path_factory.mktemp(name), DEFAULTS[name])
        for name in (PICTURES, CLIPS, EDITS)
    }


def with_defaults(checkpoint: Path, folder: Path, defaults: Mapping[str, int]) -> Path:
    """Return ``folder``, with links to the parts of ``checkpoint``, and its ``troupe.json`` changed by ``defaults``."""
    for part in checkpoint.iterdir():
        (folder / part.name).symlink_to(part)
    (folder / "troupe.json").unlink()
    own = json.loads((checkpoint / "troupe.json").read_text())
    (folder / "troupe.json").write_text(json.dumps(own | defaults))
    return folder


@pytest.fixture(scope="package")
def enhancer() -> Iterator[ChatEndpoint]:
    with chat_endpoint() as endpoint:
        yield endpoint


@pytest.fixture(scope="package")
def url(ray_cluster: None, models: dict[str, Path], enhancer: ChatEndpoint) -> Iterator[str]:
    with live(config(models, enhancer.url)) as url:
        yield url


def config(models: Mapping[str, Path], enhancer_url: str) -> ServeConfig:
    document = load_config("laptop").with_http(port=0).with_metrics(METRICS_PORT).model_dump(mode="json")
    limits = {"max_running_jobs": NUM_RUNNING, "max_waiting_jobs": NUM_WAITING, "ping_deadline_s": PING_DEADLINE_S}
    args = document["applications"][0]["args"]
    args["api"] |= {"max_body_bytes": MAX_BODY_BYTES, "prompt_enhancer": {"url": enhancer_url, "model": "writer"}}
    for model in args["models"]:
        model["path"] = str(models[model["name"]])
        model["denoiser"] |= limits | {"warm_sizes": [WARM_SIZE]}
        model["runtime_loras"] = {} if model["name"] == PICTURES else None
    return parse_config(document)
