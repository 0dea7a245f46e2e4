"""What a Python handle's keywords become, and how a wrong one is told."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from deployments.requests.errors import RequestError
from deployments.requests.handle import handle_request
from tests.deployments.support.fake_studio import FakeStudio

CARDS = FakeStudio().cards()


@pytest.mark.parametrize(("model", "format"), [("fake-pictures", "png"), ("fake-clips", "mp4"), (None, "png")])
def test_the_model_decides_what_is_made(model: str | None, format: str) -> None:
    request, output, _ = handle_request(CARDS, "id", {"prompt": "a", "model": model, "seed": 3})
    assert (request.model, request.seed, output.format) == (model or "fake-pictures", 3, format)


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        (
            {"model": "other"},
            "model",
            "model_not_found",
            "There is no model 'other'; models served: fake-pictures, fake-clips",
        ),
        ({"model": ["fake-pictures"]}, "model", "model_not_found", "There is no model"),
        ({"n": 2}, "n", "invalid_value", "n is 2"),
        ({"model": "fake-clips", "n": 2}, "n", "invalid_value", "a request makes one clip"),
        ({"seed": "3"}, "seed", "invalid_value", "seed is '3'"),
    ],
)
def test_a_wrong_field_is_a_value_error(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        handle_request(CARDS, "id", {"prompt": "a", **fields})
    error = pickle.loads(pickle.dumps(caught.value))  # as it reaches the caller of a handle
    assert isinstance(error, RequestError)
    assert (error.param, error.code, str(error)) == (param, code, str(caught.value))
