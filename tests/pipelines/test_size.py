"""Sizes have one notation, and one set of rules per model."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from deployments.requests.bodies import ImageBody, MediaBody, VideoBody
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import Requester, RequestRules
from deployments.requests.size_choice import choose_size
from deployments.service.interface import ModelCard
from deployments.stages.stage_config import DenoiserConfig
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.request import NO_PICTURES
from pipelines.size import MAX_SIDES, PIXELS, Size, SizeLimits
from tests.pipelines.support.sample_requests import clip, picture


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024x768", Size(width=1024, height=768)),
        ("832x480x81", Size(width=832, height=480, num_frames=81)),
    ],
)
def test_sizes_are_read_and_written_alike(text: str, size: Size) -> None:
    assert Size.parse(text) == size
    assert str(size) == text
    assert DenoiserConfig(warm_sizes=(text,)).warm_sizes == (size,)  # type: ignore[arg-type]


WRONG = [
    "",
    "1024",
    "1024x",
    "x768",
    "0x64",
    "64x0",
    "064x64",
    "-64x64",
    "64X64",
    "64x64x0",
    "64x64x5x5",
    " 64x64",
    "६४x64",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_size_is_none_anywhere(text: str) -> None:
    with pytest.raises(ValueError, match="write it as WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES"):
        Size.parse(text)
    with pytest.raises(ValueError, match="write it as WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES"):
        DenoiserConfig(warm_sizes=(text,))  # type: ignore[arg-type]
    defaults = Checkpoint.open("flux-shapes").defaults
    if text:  # in a request, it counts as absent
        with pytest.raises(ValueError, match="must be WIDTHxHEIGHT in pixels, such as 128x128"):
            choose_size(body(size=text), defaults)
    assert re.fullmatch(PIXELS, text) is None


def body(**fields: Any) -> MediaBody:
    return MediaBody(prompt="a", **fields)


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="must be") as caught:
        ask()
    return str(caught.value)


@pytest.mark.parametrize(("width", "height"), [(50, 32), (32, 50), (0, 32), (32, 0)])
def test_both_sides_are_positive_multiples(width: int, height: int) -> None:
    limits = SizeLimits(multiple=8, max_pixels=4096)
    assert f"size is {width}x{height}: width and height must be" in refusal(lambda: limits.check(width, height))


def test_a_size_may_reach_each_limit_and_exceed_none() -> None:
    limits = SizeLimits(multiple=16, max_pixels=256 * 256, min_side=32, max_side=512)
    for width, height in ((256, 256), (512, 128), (32, 512)):
        limits.check(width, height)
    refused = {
        (272, 256): "size is 272x256, 69632 pixels: at most 65536 pixels are allowed, such as 272x240",
        (512, 144): "size is 512x144, 73728 pixels: at most 65536 pixels are allowed, such as 512x128",
        (528, 64): "size is 528x64; width and height must be at most 512",
        (16, 64): "size is 16x64; width and height must be at least 32",
    }
    for (width, height), text in refused.items():
        with pytest.raises(ValueError, match=r"^size is") as caught:
            limits.check(width, height)
        assert str(caught.value) == text


@pytest.mark.torch
def test_the_directory_the_sampler_and_the_api_refuse_a_size_in_the_same_words(tiny_flux: Path) -> None:
    checkpoint, request = Checkpoint(tiny_flux), picture(width=50)
    text = "size is 50x32: width and height must be positive multiples of 8, such as 48x32"
    assert refusal(lambda: checkpoint.defaults.check(request)) == text
    assert refusal(lambda: checkpoint.first_step(request)) == text
    assert refusal(lambda: checkpoint.defaults.request(Size(width=50, height=32))) == text
    assert refusal_of_api(checkpoint, size="50x32") == text


@pytest.mark.torch
def test_so_they_do_a_number_of_frames(tiny_wan: Path) -> None:
    checkpoint, request = Checkpoint(tiny_wan), clip(num_frames=7)
    text = "num_frames is 7; it must be 1 + a multiple of 4, such as 9"
    assert refusal(lambda: checkpoint.defaults.check(request)) == text
    assert refusal(lambda: checkpoint.first_step(request)) == text
    assert refusal_of_api(checkpoint, num_frames=7) == text


@pytest.mark.torch
def test_and_steps(tiny_flux: Path) -> None:
    checkpoint, request = Checkpoint(tiny_flux), picture(num_inference_steps=101)
    text = "num_inference_steps is 101; it must be from 1 to 100"
    assert refusal(lambda: checkpoint.defaults.check(request)) == text
    assert refusal_of_api(checkpoint, num_inference_steps=101) == text


def refusal_of_api(checkpoint: Checkpoint, **fields: Any) -> str:
    """Return the message of the API, which names the one of ``fields``."""
    card = ModelCard(name="m", family="", created=0, defaults=checkpoint.defaults)
    sent = (VideoBody if checkpoint.defaults.kind == "video" else ImageBody)(prompt="a", **fields)
    with pytest.raises(RequestError, match="must be") as caught:
        RequestRules(card).check(sent, NO_PICTURES, Requester(request_id="id"))
    assert [caught.value.param] == list(fields)
    return str(caught.value)


@pytest.mark.torch
def test_a_default_request_says_what_the_model_does(tiny_wan: Path) -> None:
    defaults: Defaults = replace(Checkpoint(tiny_wan).defaults, width=64, height=48, num_frames=9)
    request = defaults.request()
    assert (request.width, request.height, request.num_frames, request.fps) == (64, 48, 9, 16)
    assert (request.kind, request.true_cfg_scale, request.prompt) == ("video", 5.0, "")
    changed = defaults.request(Size(width=32, height=32, num_frames=5), prompt="a star", true_cfg_scale=1.0)
    assert (changed.width, changed.num_frames, changed.prompt, changed.true_cfg_scale) == (32, 5, "a star", 1.0)
    asks: list[Callable[[], object]] = [
        lambda: defaults.request(num_frames=0),
        lambda: defaults.request(Size(width=32, height=32, num_frames=0)),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match="num_frames is 0"):
            ask()
    with pytest.raises(ValueError, match="num_frames is 0; it must be at least 5"):
        replace(defaults, min_frames=5).request(num_frames=0)


LIMITS = [
    SizeLimits(multiple=16, max_pixels=256 * 256),
    SizeLimits(multiple=32, max_pixels=1280 * 720),
    SizeLimits(multiple=16, max_pixels=16 * 16),
    SizeLimits(multiple=32, max_pixels=1920 * 1088, min_side=64),
    SizeLimits(multiple=24, max_pixels=1280 * 720, min_side=50, max_side=1000),
    SizeLimits(multiple=16, max_pixels=2048 * 2048, max_side=MAX_SIDES["mp4"]),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("width", [1, 15, 24, 100, 333, 995, 4096, 99_999])
@pytest.mark.parametrize("height", [1, 40, 250, 7000])
def test_what_is_suggested_is_allowed(width: int, height: int, limits: SizeLimits) -> None:
    size = limits.nearest(width, height)
    limits.check(size.width, size.height)


def test_what_is_suggested_is_as_long_as_it_must_be() -> None:
    limits = SizeLimits(multiple=32, max_pixels=1920 * 1088, min_side=64)
    for size, nearest in (((512, 0), "512x64"), ((99_968, 64), "32640x64")):
        with pytest.raises(ValueError, match=f"such as {nearest}"):
            limits.check(*size)


@pytest.mark.torch
def test_a_clip_is_no_longer_than_its_file_can_be(tiny_wan: Path) -> None:
    defaults = Checkpoint(tiny_wan).defaults
    defaults.check_size(16_384, 16)
    with pytest.raises(ValueError, match="size is 16400x16; width and height must be at most 16384"):
        defaults.check_size(16_400, 16)
    assert str(defaults.nearest_size(99_999, 16)) == "16384x16"


@pytest.mark.parametrize("limits", [SizeLimits(multiple=16, max_pixels=96 * 64, min_side=40, max_side=100)])
def test_a_size_is_allowed_if_its_check_raises_nothing(limits: SizeLimits) -> None:
    allowed = []
    for width, height in product(range(0, 130, 8), repeat=2):
        with suppress(ValueError):
            limits.check(width, height)
            allowed.append((width, height))
    assert allowed
    sizes = (Size(width=width, height=height, num_frames=5) for width, height in product(range(0, 130, 8), repeat=2))
    assert [(size.width, size.height) for size in sizes if limits.allows(size)] == allowed
