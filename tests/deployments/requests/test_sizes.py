"""The size of a result is that of its input picture, and no larger than its file can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diffusers.pipelines.qwenimage.pipeline_qwenimage_layered import calculate_dimensions

from deployments.requests.bodies import EditBody, ImageBody, VideoBody
from deployments.requests.images import ImageRequest
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import Requester, RequestRules, ResolvedRequest
from deployments.requests.size_choice import choose_size, size_of
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import NO_PICTURES, InputPicture
from tests.deployments.support.fake_service import CLIPS, EDITS, PICTURES

LARGE = replace(EDITS, width=1024, height=1024, max_pixels=2048 * 2048)
TIGHT = replace(EDITS, width=64, height=64, max_pixels=64 * 64)


@pytest.mark.parametrize(
    ("defaults", "picture", "size"),
    [
        (LARGE, (512, 512), (512, 512)),
        (LARGE, (600, 400), (608, 400)),
        (LARGE, (1024, 1024), (1024, 1024)),
        (LARGE, (4000, 3000), (1184, 880)),
        (LARGE, (3000, 4000), (880, 1184)),
        (LARGE, (8000, 800), (3232, 320)),
        (LARGE, (7, 5), (16, 16)),
        (TIGHT, (120, 90), (80, 48)),
    ],
)
def test_without_a_size_the_picture_says_it(
    defaults: Defaults, picture: tuple[int, int], size: tuple[int, int]
) -> None:
    """It has about the picture's shape, and at most the model's default area, up to a multiple."""
    first = InputPicture(width=picture[0], height=picture[1], mode="L", data=b"")
    assert choose_size(EditBody(prompt="a"), defaults, first) == size
    assert choose_size(EditBody(prompt="a", size="auto"), defaults, first) == size
    assert choose_size(EditBody(prompt="a", size="32x64"), defaults, first) == (32, 64)
    assert choose_size(EditBody(prompt="a", width=32, height=64), defaults, first) == (32, 64)
    assert choose_size(EditBody(prompt="a"), defaults) == (defaults.width, defaults.height)
    defaults.check_size(*size)


@pytest.mark.parametrize(
    ("width", "height"), [(640, 640), (3000, 2000), (300, 500), (20, 13), (1001, 777), (160, 1600)]
)
def test_a_picture_of_any_size_asks_for_as_many_pixels(width: int, height: int) -> None:
    """The rule is that of diffusers' pipeline for layers."""
    area = replace(PICTURES, width=640, height=640, size_multiple=32, max_pixels=2**21, enlarges_pictures=True)
    picture = InputPicture(width=width, height=height, mode="L", data=b"")
    assert size_of(picture, area) == calculate_dimensions(640 * 640, width / height)
    plain = size_of(picture, replace(area, enlarges_pictures=False))
    assert (plain == size_of(picture, area)) == (width * height >= 640 * 640)


LONG = {
    name: ModelCard(name=name, family="fake", created=0, defaults=replace(defaults, size_multiple=1, max_pixels=2**22))
    for name, defaults in {"pictures": PICTURES, "clips": CLIPS}.items()
}


def asked_for(**fields: Any) -> ImageRequest:
    resolved = ResolvedRequest(card=LONG["pictures"], body=ImageBody(prompt="a", **fields))
    return ImageRequest.of(resolved, Requester(request_id="id"), max_n=1)


@pytest.mark.parametrize(("written", "longest"), [("webp", 16_383), ("jpeg", 65_500)])
def test_a_picture_that_no_file_of_its_format_holds_is_refused(written: str, longest: int) -> None:
    """It is refused before it is painted, not when it would be encoded."""
    for sides in ({"width": longest, "height": 32}, {"width": 32, "height": longest}):
        assert asked_for(output_format=written, **sides).output.format == written
    for sides in ({"width": longest + 1, "height": 32}, {"width": 32, "height": longest + 1}):
        with pytest.raises(RequestError, match=f"holds at most {longest} pixels.* output_format to png") as no:
            asked_for(output_format=written, **sides)
        assert no.value.param == "output_format"
        assert asked_for(output_format="png", **sides)


def test_a_clip_that_no_file_holds_is_refused() -> None:
    rules, requester = RequestRules(LONG["clips"]), Requester(request_id="id")
    assert rules.check(VideoBody(prompt="a", size="16384x32"), NO_PICTURES, requester)
    with pytest.raises(RequestError, match="size is 32x16385; width and height must be at most 16384") as no:
        rules.check(VideoBody(prompt="a", size="32x16385"), NO_PICTURES, requester)
    assert no.value.param == "size"
