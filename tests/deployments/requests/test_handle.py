"""A Python handle's keywords become a request, and a wrong one raises an error that names it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from PIL import Image

from deployments.requests.handle import handle_request
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.request_errors import RequestError
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, Lora
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import data_url, file_of, noise

CARDS = FakeService().cards()
WITH_PICTURES = FakeService(takes_pictures=True).cards()
PICTURE = noise(48, 32)
FILE = file_of(PICTURE)
SENT = InputPicture.of(PICTURE)


@pytest.mark.parametrize(("model", "format"), [("fake-pictures", "png"), ("fake-clips", "mp4"), (None, "png")])
def test_the_model_decides_what_is_made(model: str | None, format: str) -> None:
    request, output, pictures = handle_request(CARDS, "id", {"prompt": "a", "model": model, "seed": 3})
    assert pictures is NO_PICTURES
    assert (request.model, request.seed, output.format) == (model or "fake-pictures", 3, format)


@pytest.mark.parametrize(
    ("fields", "made", "format"),
    [
        ({}, ("video", 32, 17, 8), "mp4"),
        ({"kind": "video"}, ("video", 32, 17, 8), "mp4"),
        ({"kind": "image"}, ("image", 96, 1, 0), "png"),
        ({"kind": "image", "output_format": "webp"}, ("image", 96, 1, 0), "webp"),
    ],
)
def test_the_kind_decides_where_a_model_makes_both(fields: dict[str, Any], made: tuple[Any, ...], format: str) -> None:
    cards = FakeService(makes_both=True).cards()
    request, output, _ = handle_request(cards, "id", {"prompt": "a", "model": "fake-both", **fields})
    assert (request.kind, request.width, request.num_frames, request.fps) == made
    assert output.format == format


@pytest.mark.parametrize(
    ("field", "model"), [("image", "fake-edits"), ("images", "fake-edits"), ("input_reference", "fake-begun-clips")]
)
def test_without_a_model_pictures_choose_one(field: str, model: str) -> None:
    assert handle_request(WITH_PICTURES, "id", {"prompt": "a", field: FILE})[0].model == model


@pytest.mark.parametrize(("field", "model"), [("image", "fake-edits"), ("input_reference", "fake-begun-clips")])
@pytest.mark.parametrize(("background", "colour"), [("navy", "navy"), ("#ff8800", "#ff8800"), ("auto", None)])
def test_a_colour_lies_beneath_transparent_pictures(
    field: str, model: str, background: str, colour: str | None
) -> None:
    clear = noise(48, 32, "RGBA")
    fields = {"prompt": "a", "model": model, "background": background, field: file_of(clear)}
    _, _, given = handle_request(WITH_PICTURES, "id", fields)
    ground = None if colour is None else Image.new("RGBA", clear.size, colour)
    expected = clear if ground is None else Image.alpha_composite(ground, clear).convert("RGB")
    assert given.pictures == (InputPicture.of(expected),)


@pytest.mark.parametrize(("kind", "model"), [("image", "fake-pictures"), ("video", "fake-clips")])
def test_without_a_model_the_kind_chooses_one(kind: str, model: str) -> None:
    assert handle_request(CARDS, "id", {"prompt": "a", "kind": kind})[0].model == model


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
        ({"kind": "clip"}, "kind", "invalid_value", "kind is 'clip'; it must be image or video"),
        ({"model": "fake-clips", "kind": "image"}, "model", "wrong_kind", "'fake-clips' makes videos, not images"),
        ({"seed": "3"}, "seed", "invalid_value", "seed is '3'"),
    ],
)
def test_a_wrong_field_is_a_value_error(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        handle_request(CARDS, "id", {"prompt": "a", **fields})
    error = pickle.loads(pickle.dumps(caught.value))  # as in the caller of a handle
    assert isinstance(error, RequestError)
    assert (error.param, error.code, str(error)) == (param, code, str(caught.value))


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"model": "fake-edits", "image": FILE, "strength": 0.5}, InputPictures(pictures=(SENT,))),
        ({"model": "fake-edits", "image": [FILE, data_url(FILE)]}, InputPictures(pictures=(SENT, SENT))),
        ({"model": "fake-begun-clips", "input_reference": FILE}, InputPictures(pictures=(SENT,))),
    ],
    ids=["a picture", "two", "a clip"],
)
def test_pictures_come_along_as_bytes(fields: dict[str, Any], inputs: InputPictures) -> None:
    request, _, pictures = handle_request(WITH_PICTURES, "id", {"prompt": "a", **fields})
    assert pictures == inputs
    assert (request.num_pictures, request.strength) == (len(inputs.pictures), fields.get("strength"))
    assert (request.width, request.height) == (48, 32)


def test_a_mask_comes_along() -> None:
    fields = {"model": "fake-edits", "image": FILE, "mask": file_of(PICTURE.convert("RGBA").convert("L"))}
    request, _, pictures = handle_request(WITH_PICTURES, "id", {"prompt": "a", **fields})
    assert request.has_mask
    assert pictures.mask == InputPicture.of(PICTURE.convert("RGBA").convert("L"))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": "fake-pictures", "image": FILE}, "image", "1 input picture was sent; this model takes none"),
        ({"model": "fake-edits"}, "image", "0 input pictures were sent; this model takes from 1 to 3"),
        ({"model": "fake-edits", "image": FILE[:500]}, "image", "image is broken"),
        ({"model": "fake-edits", "image": bytes(3001)}, "image", "a picture may have 3000 at most"),
        ({"model": "fake-begun-clips", "image": FILE}, "image", "Unknown field 'image'"),
    ],
    ids=["words alone", "none", "broken", "large", "a clip"],
)
def test_wrong_pictures_are_value_errors(fields: dict[str, Any], param: str, message: str) -> None:
    limits = PictureLimits(max_picture_bytes=3000)
    with pytest.raises(RequestError, match=message) as caught:
        handle_request(WITH_PICTURES, "id", {"prompt": "a", **fields}, limits)
    assert caught.value.param == param


@pytest.mark.parametrize(("model", "short"), [("fake-clips", False), ("fake-pictures", True)])
def test_adapters_are_named_as_by_http(model: str, short: bool) -> None:
    cards = FakeService(loras={model: (Lora(name="ink", scale=0.5),)}).cards()
    fields = {"model": f"{model}:ink"} if short else {"model": model, "lora": [{"name": "ink", "scale": 0.5}]}
    request, *_ = handle_request(cards, "id", {"prompt": "a", **fields})
    assert (request.model, request.loras) == (model, (Lora(name="ink", scale=0.5),))
    with pytest.raises(RequestError, match="its adapters: ink"):
        handle_request(cards, "id", {"prompt": "a", "model": f"{model}:oil"})
