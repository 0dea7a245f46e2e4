"""The rules of a model name the wrong field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.pictures.video import VideoHead
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import Requester, RequestRules, _body_field
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import InputPicture, InputPictures
from tests.deployments.support.fake_service import BOTH, CLIPS, EDITS, LAYERS, REFERRED_CLIPS


@pytest.mark.parametrize(
    ("defaults", "body"),
    [
        (EDITS, EditBody(prompt="a")),
        (LAYERS, EditBody()),
        (CLIPS, VideoBody(prompt="a")),
        (BOTH, VideoBody(prompt="a")),
        (REFERRED_CLIPS, VideoBody(prompt="a")),
    ],
)
def test_every_check_of_a_model_blames_a_field_of_the_api(defaults: Defaults, body: MediaBody) -> None:
    """This includes checks that are added later."""
    known = set(EditBody.model_fields) | set(VideoBody.model_fields)
    fields = [_body_field(name, body) for name, _ in defaults.checks(defaults.request())]
    assert len(fields) == len(set(fields)) > 8
    assert set(fields) <= known


def test_a_size_is_blamed_by_the_name_that_was_used() -> None:
    assert _body_field("width", EditBody(size="64x64")) == "size"
    assert _body_field("width", EditBody(width=64, height=64)) == "width"


REFERRED = RequestRules(ModelCard(name="referred", family="", created=0, defaults=REFERRED_CLIPS))
PICTURE = "data:image/png;base64,iVBORw0KGgo="
CLIP = "data:video/mp4;base64,AAAA"


@pytest.mark.parametrize("fields", [{"input_reference": [PICTURE]}, {"video": CLIP}])
def test_a_picture_or_a_clip_is_enough_for_a_model_of_references(fields: dict[str, Any]) -> None:
    sources = REFERRED.check_sources(VideoBody.model_validate({"prompt": "a", **fields}))
    assert (len(sources.pictures), sources.video is not None) == (
        len(fields.get("input_reference", ())),
        "video" in fields,
    )


def test_words_alone_are_not() -> None:
    with pytest.raises(RequestError, match="this model needs a reference: send pictures as input_reference") as refused:
        REFERRED.check_sources(VideoBody(prompt="a"))
    assert refused.value.param == "input_reference"
    with pytest.raises(ValueError, match="this model needs a reference: send pictures as input_reference"):
        REFERRED_CLIPS.request(num_pictures=0)
    assert REFERRED_CLIPS.request().num_pictures == 1


def test_a_longer_reference_is_cut_to_the_length_of_the_result() -> None:
    form = REFERRED.video_form(VideoBody(prompt="a", num_frames=9), VideoHead(width=64, height=64))
    assert (form.max_frames, form.is_cut, form.frame_multiple) == (9, True, 1)
    form = REFERRED.video_form(VideoBody(prompt="a"), VideoHead(width=64, height=64))
    assert (form.max_frames, form.is_cut) == (REFERRED_CLIPS.num_frames, True)


@pytest.mark.parametrize(
    ("size", "is_taken"), [((64, 16), True), ((16, 64), True), ((65, 16), False), ((16, 65), False)]
)
def test_the_shape_of_a_reference_has_limits(size: tuple[int, int], is_taken: bool) -> None:
    defaults = replace(REFERRED_CLIPS, max_reference_aspect=4.0)
    rules = RequestRules(ModelCard(name="referred", family="", created=0, defaults=defaults))
    pictures = InputPictures(pictures=(InputPicture.of(Image.new("RGB", size)),))
    body, requester = VideoBody(prompt="a", size="64x64", input_reference=(PICTURE,)), Requester(request_id="id")
    refusals = []
    try:
        assert rules.check(body, pictures, requester).num_pictures == 1
    except RequestError as error:
        refusals.append((error.param, "is at most 4 times the other" in str(error)))
    assert refusals == ([] if is_taken else [("input_reference", True)])
    assert REFERRED.check(body, pictures, requester).num_pictures == 1, "any shape"
