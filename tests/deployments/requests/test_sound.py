"""The field ``generate_sound`` has its effect, and silent models refuse it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.requests.handle import handle_request
from deployments.requests.request_errors import RequestError
from deployments.service.interface import ModelCard
from tests.deployments.support.fake_service import CLIPS, PICTURES

CARDS = {
    name: ModelCard(name=name, family="fake", created=0, defaults=defaults)
    for name, defaults in {
        "sounding": replace(CLIPS, make_sound=True),
        "silent": CLIPS,
        "pictures": PICTURES,
    }.items()
}


def sound_of(model: str, **fields: Any) -> bool | None:
    return handle_request(CARDS, "id", {"prompt": "a", "model": model, **fields})[0].sound


@pytest.mark.parametrize("wanted", [None, True, False])
def test_a_model_that_sounds_is_told(wanted: bool | None) -> None:
    assert sound_of("sounding", generate_sound=wanted) is wanted


def test_silence_can_be_asked_of_all() -> None:
    assert sound_of("silent", generate_sound=False) is False
    assert sound_of("pictures", generate_sound=False) is None


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("silent", {}, "this model makes no sound"),
        ("sounding", {"num_frames": 1}, "num_frames is 1; a picture has no sound"),
        ("pictures", {}, "not supported here"),
    ],
)
def test_what_cannot_sound_says_so(model: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        sound_of(model, generate_sound=True, **fields)
    assert caught.value.param == "generate_sound"


def test_a_real_field_is_among_the_known_ones() -> None:
    with pytest.raises(RequestError, match="generate_sound") as caught:
        sound_of("sounding", unheard_of=1)
    assert "enable_teacache" not in str(caught.value)
    with pytest.raises(RequestError) as caught:
        sound_of("pictures", unheard_of=1)
    assert "generate_sound" not in str(caught.value)
