"""A model's limits decide which inputs a request may have."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.loading import SHIPPED
from pipelines.models.spec import CLIP, PICTURE


@pytest.fixture
def words_alone() -> Defaults:
    return replace(Checkpoint(SHIPPED / "flux-shapes").defaults, max_pictures=0, takes_strength=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_pictures": 1}, "this model takes none"),
        ({"has_mask": True}, "takes no mask"),
        ({"strength": 0.5}, "takes no strength"),
    ],
)
def test_a_model_of_words_takes_nothing_else(words_alone: Defaults, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        words_alone.request(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_pictures": 0}, "0 input pictures were sent; this model takes from 1 to 3"),
        ({"num_pictures": 4}, "4 input pictures were sent; this model takes from 1 to 3"),
        ({"num_pictures": 1, "strength": 0.0}, "strength is 0.0; it must be above 0"),
        ({"num_pictures": 1, "strength": 1.1}, "strength is 1.1; it must be above 0"),
    ],
)
def test_an_editor_takes_what_it_can_use(words_alone: Defaults, given: dict[str, Any], told: str) -> None:
    editor = replace(words_alone, min_pictures=1, max_pictures=3, takes_mask=True, takes_strength=True)
    assert editor.request(num_pictures=3, has_mask=True, strength=1.0).num_pictures == 3
    with pytest.raises(ValueError, match=told):
        editor.request(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_video_frames": 4}, "video has 4 frames at the clip's rate; this model takes from 5 to 33"),
        ({"num_video_frames": 34}, "video has 34 frames at the clip's rate; this model takes from 5 to 33"),
        (
            {"num_video_frames": 5, "num_pictures": 1},
            "this model takes a clip or pictures, not both",
        ),
        ({"num_video_frames": 5, "num_frames": 1}, "num_frames is 1, with an input clip; make it larger"),
    ],
)
def test_a_model_takes_clips_that_it_can_use(given: dict[str, Any], told: str) -> None:
    model = replace(CLIP, max_pictures=1, min_video_frames=5, max_video_frames=33)
    assert model.request(num_video_frames=33).num_video_frames == 33
    with pytest.raises(ValueError, match=told):
        model.request(**given)


def test_a_clip_model_s_pictures_take_no_clip() -> None:
    both = replace(CLIP, picture_width=640, picture_height=480, max_video_frames=33, takes_strength=True)
    assert both.capabilities == ("text-to-video", "video-to-video", "text-to-image")
    with pytest.raises(ValueError, match="this model takes no input clip"):
        both.check(replace(both.of("image").request(), num_video_frames=5))
    changed = both.request(num_video_frames=5, strength=0.5, num_inference_steps=10)
    assert both.num_steps_of(changed) == 5


def test_a_model_of_clips_may_make_pictures_as_well() -> None:
    """They have one frame, from words alone, without options for clips; options for both stay."""
    both = replace(CLIP, picture_width=640, picture_height=480, max_pictures=1, make_sound=True, frames_per_chunk=33)
    assert both.kinds == ("video", "image")
    assert both.of("video") is both
    picture = both.of("image").request()
    assert (picture.kind, picture.width, picture.height) == ("image", 640, 480)
    assert (picture.num_frames, picture.fps, picture.num_pictures) == (1, 0, 0)
    assert (picture.num_inference_steps, picture.true_cfg_scale) == (CLIP.num_inference_steps, CLIP.true_cfg_scale)
    both.check(picture)
    assert both.num_steps_of(replace(picture, num_inference_steps=7)) == 7
    with pytest.raises(ValueError, match="1 input picture was sent; this model takes none"):
        both.check(replace(picture, num_pictures=1))
    with pytest.raises(ValueError, match="num_frames is 5; it must be at most 1"):
        both.check(replace(picture, num_frames=5))
    with pytest.raises(ValueError, match="this model makes no sound"):
        both.check(replace(picture, sound=True))


def test_a_model_of_one_kind_makes_no_other() -> None:
    assert (CLIP.kinds, PICTURE.kinds) == (("video",), ("image",))
    with pytest.raises(ValueError, match="this model makes videos, not images"):
        CLIP.of("image")
    with pytest.raises(ValueError, match="this model makes images, not videos"):
        replace(PICTURE, picture_width=64, picture_height=64).of("video")


def test_pictures_of_a_published_model_are_by_its_pipeline_s_own_defaults() -> None:
    picture = Checkpoint.of_configuration("Cosmos3-Nano").defaults.of("image").request()
    assert (picture.width, picture.height, picture.num_frames, picture.num_inference_steps) == (1280, 720, 1, 35)


def test_a_model_may_keep_a_sound_if_its_check_raises_nothing() -> None:
    for keeps_length, make_sound, hears, takes_clips in product((False, True), repeat=4):
        one = replace(CLIP, keeps_length=keeps_length, make_sound=make_sound)
        one = replace(one, video_sound_rate=24_000 * hears, max_video_frames=9 * takes_clips)
        assert one.may_keep_audio == (hears or (takes_clips and keeps_length and not make_sound))
        with nullcontext() if one.may_keep_audio else pytest.raises(ValueError, match="keep_audio is true; "):
            one.check_keep_audio()
