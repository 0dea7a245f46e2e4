"""The field ``strength`` saves steps: enough must be left, and they have the previews."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.requests.handle import handle_request
from deployments.requests.request_errors import RequestError
from deployments.service.interface import ModelCard
from pipelines.request import MediaRequest
from tests.deployments.support.fake_service import CLIPS, PICTURES
from tests.deployments.support.files import file_of, noise

PAINTER = replace(PICTURES, max_pictures=1, takes_strength=True, max_steps=100, num_inference_steps=20)
CARDS = {
    name: ModelCard(name=name, family="fake", created=0, defaults=defaults)
    for name, defaults in {
        "up": PAINTER,
        "down": replace(PAINTER, rounds_steps_down=True),
        "chunks": replace(CLIPS, frames_per_chunk=1),
    }.items()
}


def request_of(model: str, **fields: Any) -> MediaRequest:
    return handle_request(CARDS, "id", {"prompt": "a", "model": model, **fields})[0]


def painted_over(model: str, strength: float, num_steps: int, **fields: Any) -> MediaRequest:
    return request_of(model, image=file_of(noise(64, 64)), strength=strength, num_inference_steps=num_steps, **fields)


def test_previews_are_spread_over_the_steps_that_are_left() -> None:
    assert painted_over("up", 0.4, 20, partial_images=3).preview_steps == (2, 4, 6)
    assert painted_over("up", 1.0, 20, partial_images=3).preview_steps == (5, 10, 15)


def test_previews_are_spread_over_all_chunks() -> None:
    assert request_of("chunks", num_frames=5, num_inference_steps=4).preview_steps == (5, 10, 15)


def test_few_steps_are_refused_of_which_none_is_left() -> None:
    with pytest.raises(RequestError, match="leaves none of 2 steps; it must be at least 1/2") as caught:
        painted_over("down", 0.4, 2)
    assert caught.value.param == "strength"
    assert painted_over("up", 0.4, 2).strength == 0.4


def test_many_steps_are_not_taken_for_the_usual_number() -> None:
    assert painted_over("down", 0.02, 100).num_inference_steps == 100
