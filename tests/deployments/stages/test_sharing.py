"""Two models take turns and give their results alone, though a sleeping rank and the arbiter are killed.

A third one has its GPUs alone and offloads blocks. Its encoder, whose layers are offloaded, takes turns with its gang.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from deployments.sharing.share_actor import ShareSpec, share_actor
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.live import config_of, live, log_lines, picture, pixels_of, rank_pids, wait_until
from tests.support.fenced import ROOT

ONE, TWO, THREE = "one", "two", "three"
FOLDER = ROOT / "pipelines" / "checkpoints" / "flux-shapes"
MODELS = dict.fromkeys((ONE, TWO), FOLDER)
NUM_RANKS = {ONE: 2, TWO: 1}
GANG_ALONE_GIB = 0.027
"""Room for transformer and decoder, 27.4 MB in float32, but not for the text encoders (2.9 MB) beside them."""


def config() -> ServeConfig:
    """Return two models of which one fits the memory, but not both. Half of their weights may be pinned."""
    document = config_of({**MODELS, THREE: FOLDER}).model_dump(mode="json")
    args = document["applications"][0]["args"]
    *sharing, alone = args["models"]
    for model in sharing:
        model |= {"share": "cores", "stages": "together"}
        model["denoiser"]["num_ranks"] = NUM_RANKS[model["name"]]
    alone |= {"stages": "apart", "text_encoder": {"takes_turns": True, "offloads_layers": True}}
    alone["denoiser"] |= {"num_ranks": 1, "torch": {"offloaded_blocks": 2}}
    args["shares"] = {"cores": {"memory_gib": 0.07, "host_memory_gib": 0.05}, THREE: {"memory_gib": GANG_ALONE_GIB}}
    return parse_config(document)


def arbiter() -> Any:
    app = config().app
    return share_actor(ShareSpec(name="cores", config=app.shares["cores"], models=app.sharing("cores")))


def awake() -> tuple[str, ...]:
    found: tuple[str, ...] = ray.get(arbiter().status.remote())["awake"]
    return found


@pytest.fixture(scope="module")
def url(ray_cluster: None) -> Iterator[str]:
    with live(config()) as url:
        yield url


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Any]:
    """Return pixels by model and seed, of the bare pipeline in this process."""
    models: dict[str, Path] = MODELS
    frames = {seed: bare_frames(models, model=ONE, seed=seed)[0] for seed in range(2)}
    return {(model, seed): frames[seed] for model in models for seed in frames}


def assert_as_alone(url: str, alone: dict[tuple[str, int], Any]) -> dict[tuple[str, int], bytes]:
    """Send all requests at once; check and return their files."""
    with ThreadPoolExecutor(len(alone)) as pool:
        asked = {key: pool.submit(picture, url, model=key[0], seed=key[1]) for key in alone}
        made = {key: answer.result() for key, answer in asked.items()}
    for key, data in made.items():
        assert_same_picture(pixels_of(data), alone[key])
    return made


def swaps() -> dict[str, int]:
    ends = [line for line in log_lines("phase is over") if line["phase"] == "gang: wake"]
    return {model: sum(line["model"] == model for line in ends) for model in MODELS}


def test_models_take_turns_and_give_what_they_give_alone(url: str, alone: dict[tuple[str, int], Any]) -> None:
    before = swaps()
    first = assert_as_alone(url, alone)
    assert len(awake()) == 1, "they fit alone"
    assert assert_as_alone(url, alone) == first, "the same bytes after more swaps"
    assert all(swaps()[model] > before[model] for model in MODELS)
    assert ray.get(arbiter().status.remote())["pinned_bytes"] <= 0.05 * 2**30


def test_a_killed_arbiter_and_a_killed_sleeping_rank_lose_nothing(url: str, alone: dict[tuple[str, int], Any]) -> None:
    picture(url, model=TWO, seed=0)
    wait_until(lambda: awake() == (TWO,), "the other sleeps")
    asleep, others = rank_pids(ONE), rank_pids(TWO)
    ray.kill(arbiter(), no_restart=False)
    os.kill(asleep[0], signal.SIGKILL)
    assert_as_alone(url, alone)
    assert rank_pids(ONE) != asleep
    assert rank_pids(TWO) == others, "the GPUs are still held without the arbiter"


def test_an_encoder_takes_turns_with_its_gang(url: str, alone: dict[tuple[str, int], Any]) -> None:
    """Its weights sleep while the gang works, and the gang's while it encodes. A cached prompt wakes no encoder."""
    for seed, num_swaps in ((0, 1), (1, 1)):
        assert_same_picture(pixels_of(picture(url, model=THREE, seed=seed)), alone[ONE, seed])
        assert num_wake_ups(THREE) == num_swaps
    picture(url, model=THREE, prompt="a large red circle")
    assert num_wake_ups(THREE) == 2


def num_wake_ups(model: str) -> int:
    return sum(line["phase"] == "gang: wake" and line["model"] == model for line in log_lines("phase is over"))
