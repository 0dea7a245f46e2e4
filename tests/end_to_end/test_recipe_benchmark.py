"""The benchmark of recipes measures the running application, and reports what it cannot measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.application.client import Client
from benchmarks.recipes.__main__ import of_parts
from benchmarks.recipes.parts import LATE, PARTS
from benchmarks.recipes.requests import PLAIN, Served
from benchmarks.serving.settings import find_parts
from tests.deployments.support.live import TIMEOUT_S
from tests.end_to_end.conftest import config

NUM_STEPS = 3


@pytest.fixture
def served(url: str, models: dict[str, Path]) -> Iterator[Served]:
    """Yield the application with only its configuration's adapters, before and afterwards."""
    application: Any = None
    with Client(url) as client:
        client.timeout = httpx.Timeout(TIMEOUT_S)
        fields = {"size": "64x64"}
        served = config(models, "http://127.0.0.1:9")
        yield Served(
            application=application, client=client, config=served, fields=fields, num_steps=NUM_STEPS, repeats=1
        )
        for lora in client.get("/v1/loras").json()["data"]:
            client.delete(f"/v1/loras/{lora['id']}").raise_for_status()


def test_each_part_measures_what_it_says(served: Served) -> None:
    found = list(of_parts(served, find_parts(PARTS, "recipes,switch,attention,loras,queue")))
    plain, recipe, switch, attention, late, queue = found
    assert [(one["way"], one["steps"]) for one in (plain, recipe)] == [(PLAIN, NUM_STEPS), ("four-steps", 4)]
    assert plain["psnr_db"] is None
    assert recipe["psnr_db"] > 10, "the recipe draws the same picture, in other pixels"
    assert switch["between"] == [PLAIN, "four-steps"]
    assert switch["switch_ms"].keys() == switch["step_ms"].keys() == {PLAIN, "four-steps"}
    assert "no attention in float8" in attention["error"], "this application has no such recipe"
    assert "error" not in late, late
    assert late["adapter_of"] == "four-steps"
    assert late["pixels_as_recipe"], "the adapter that came later is the recipe's"
    assert served.firsts[LATE].data != served.firsts[PLAIN].data
    assert sorted(queue["ended"]) == sorted([PLAIN, "four-steps"] * queue["num_of_each"])
    assert all(one["same_bytes"] for one in (plain, recipe, switch, late, queue))
