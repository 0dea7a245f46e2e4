"""What a Python handle's keywords become, and how a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.requests.handle import plan_generate
from tests.deployments.support.fake_studio import FakeStudio

CARDS = FakeStudio().cards()


@pytest.mark.parametrize(("model", "format"), [("fake-pictures", "png"), ("fake-clips", "mp4"), (None, "png")])
def test_the_model_decides_what_is_made(model: str | None, format: str) -> None:
    request, output = plan_generate(CARDS, "id", {"prompt": "a", "model": model, "seed": 3})
    assert (request.model, request.seed, output.format) == (model or "fake-pictures", 3, format)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "other"}, "There is no model 'other'; models served: fake-pictures, fake-clips"),
        ({"model": ["fake-pictures"]}, "There is no model"),
        ({"n": 2}, "n is 2"),
        ({"model": "fake-clips", "n": 1}, "Unknown field 'n'"),
        ({"seed": "3"}, "seed is '3'"),
    ],
)
def test_a_wrong_field_is_a_value_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_generate(CARDS, "id", {"prompt": "a", **fields})
