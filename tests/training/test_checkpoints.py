"""What ships paints what held-out prompts ask for, and each seed another picture. The report has all 240 prompts."""

import argparse

import pytest

from training.evaluate import (
    check_motion,
    check_still,
    held_out_motion_prompts,
    held_out_prompts,
    load,
    paint_stills,
    paint_videos,
    with_shipped_settings,
)
from training.judge import look_at
from training.seeds import distances, spread

SETTINGS = argparse.Namespace(model="flux-shapes", seeds=4, seed=0)


def test_settings_that_are_left_open_are_those_that_ship() -> None:
    asked = argparse.Namespace(height=64, guidance=None)
    for model, side, guidance in (("flux-shapes", 128, 3.5), ("wan-shapes", 96, 3.0)):
        settings = with_shipped_settings(asked, model)
        assert (settings.height, settings.width, settings.steps, settings.guidance) == (64, side, 20, guidance)


def test_held_out_pictures_are_right() -> None:
    asked = held_out_prompts(10, seed=7)
    pictures = paint_stills(load("flux-shapes"), [text for _, text in asked], SETTINGS, seed=0)
    checks = [check_still(scene, look_at(picture)) for (scene, _), picture in zip(asked, pictures, strict=True)]
    for name in ("shape and colour", "place", "background"):
        assert sum(check[name] for check in checks) >= 9, name


def test_held_out_videos_are_right() -> None:
    asked = held_out_motion_prompts(4, seed=7)
    videos = paint_videos(load("wan-shapes"), [text for _, text in asked], SETTINGS, seed=0)
    for (scene, text), video in zip(asked, videos, strict=True):
        assert check_motion(scene, [look_at(frame) for frame in video])["motion"], text


def test_every_seed_gives_another_right_picture() -> None:
    scene, text = next((s, t) for s, t in held_out_prompts(20, seed=8) if s.relation)
    row = spread(load("flux-shapes"), scene, text, SETTINGS)
    assert row["closest"] > 0.5
    assert row["right"] == "4 of 4"


def test_one_seed_gives_one_picture() -> None:
    pipeline, (_, text) = load("flux-shapes"), held_out_prompts(1, seed=9)[0]
    quick = argparse.Namespace(**{**vars(SETTINGS), "height": 64, "width": 64, "steps": 4})
    first, again = (paint_stills(pipeline, [text], quick, seed=3)[0] for _ in range(2))
    assert distances([first, again]).max() == pytest.approx(0)
