"""The judge reads pictures drawn by Pillow, which shares nothing with the project's own drawing, and both agree."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from training.evaluate import check_motion, check_still
from training.judge import Picture, Pixels, look_at, motion_of, place_of, size_of
from training.shapes.draw import PALETTE, draw, motion_drawings, still_drawings
from training.shapes.scenes import SHAPES, random_motion_scene, random_scene

SIDE, OVERSAMPLING = 128, 4
Corners = list[tuple[float, float]]


def _rgb(name: str) -> tuple[int, ...]:
    return tuple(round(255 * value) for value in PALETTE[name])


def _corners(shape: str, x: float, y: float, radius: float, angle: float) -> Corners:
    count = {"triangle": 3, "square": 4, "star": 10, "circle": 90}[shape]
    start = angle - math.pi / (4 if shape == "square" else 2)
    lengths = [radius * (0.45 if shape == "star" and i % 2 else 1) for i in range(count)]
    turns = [start + 2 * math.pi * i / count for i in range(count)]
    return [(x + r * math.cos(t), y + r * math.sin(t)) for r, t in zip(lengths, turns, strict=True)]


def picture(
    *shapes: tuple[str, str, float, float, float, float], background: str = "white", side: int = SIDE
) -> Pixels:
    """Draw shapes as (shape, colour, x, y, radius, angle), smoothed by drawing large."""
    large = side * OVERSAMPLING
    image = Image.new("RGB", (large, large), _rgb(background))
    for shape, colour, x, y, radius, angle in shapes:
        corners = _corners(shape, x * large, y * large, radius * large, angle)
        ImageDraw.Draw(image).polygon(corners, fill=_rgb(colour))
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [0.1, 0.25])
@pytest.mark.parametrize("side", [64, 128])
def test_shape_colour_and_place_at_any_angle(shape: str, radius: float, side: int) -> None:
    for angle in (0.0, 0.4, 1.0):
        seen = look_at(picture((shape, "purple", 0.3, 0.7, radius, angle), background="yellow", side=side))
        assert seen.background == "yellow"
        assert len(seen.shapes) == 1
        shown = seen.shapes[0]
        assert (shown.shape, shown.colour) == (shape, "purple")
        assert abs(shown.x - 0.3) < 0.015
        assert abs(shown.y - 0.7) < 0.015
        assert place_of(shown) == (-1, 1)


def test_every_colour_on_every_background() -> None:
    for colour in PALETTE:
        for background in PALETTE:
            if colour not in (background, "grey"):
                seen = look_at(picture(("circle", colour, 0.5, 0.5, 0.2, 0), background=background))
                assert (seen.background, seen.shapes[0].colour) == (background, colour)


def test_two_shapes_and_sizes() -> None:
    seen = look_at(picture(("circle", "red", 0.25, 0.3, 0.1, 0), ("square", "blue", 0.7, 0.7, 0.25, 0)))
    assert [(shown.shape, shown.colour, size_of(shown)) for shown in seen.shapes] == [
        ("square", "blue", "large"),
        ("circle", "red", "small"),
    ]


def test_an_empty_picture_and_a_wrong_one() -> None:
    assert look_at(picture()).shapes == ()
    blob = look_at(picture(("circle", "red", 0.4, 0.5, 0.15, 0), ("square", "red", 0.55, 0.5, 0.15, 0)))
    assert len(blob.shapes) == 1  # two that touch are one, and so count as wrong for a prompt of two


def _clip(shape: str, path: list[tuple[float, float, float, float]]) -> list[Picture]:
    return [look_at(picture((shape, "green", x, y, radius, angle), side=96)) for x, y, radius, angle in path]


@pytest.mark.parametrize(
    ("motion", "end"),
    [
        ("right", (0.8, 0.5, 0.15, 0.0)),
        ("down", (0.5, 0.8, 0.15, 0.0)),
        ("grow", (0.5, 0.5, 0.3, 0.0)),
        ("shrink", (0.5, 0.5, 0.08, 0.0)),
        ("turn", (0.5, 0.5, 0.15, 1.7)),
        ("still", (0.5, 0.5, 0.15, 0.0)),
    ],
)
def test_motions(motion: str, end: tuple[float, float, float, float]) -> None:
    start = (0.2 if motion == "right" else 0.5, 0.2 if motion == "down" else 0.5, 0.15, 0.0)
    path = [tuple(a + (b - a) * i / 8 for a, b in zip(start, end, strict=True)) for i in range(9)]
    for shape in ("square", "triangle", "star"):
        clip = _clip(shape, path)  # type: ignore[arg-type]
        assert motion_of(clip) == motion
        if motion in ("right", "down"):
            assert motion_of(clip[::-1]) == {"right": "left", "down": "up"}[motion]
    assert motion_of([Picture(background="white", shapes=())]) == "lost"


def _bytes(values: torch.Tensor) -> Pixels:
    return ((values + 1) * 127.5).round().byte().movedim(1, -1).numpy()


@pytest.mark.parametrize(("height", "width"), [(128, 128), (64, 96)])
def test_the_judge_passes_what_training_draws(height: int, width: int) -> None:
    rng = random.Random(3)
    scenes = [random_scene(rng) for _ in range(60)]
    pictures = _bytes(draw(still_drawings(scenes), height=height, width=width)[:, :, 0])
    checks = [check_still(scene, look_at(pixels)) for scene, pixels in zip(scenes, pictures, strict=True)]
    for name in ("shape and colour", "place", "size", "background"):
        assert all(check[name] for check in checks), name


def test_the_judge_passes_the_motions_that_training_draws() -> None:
    rng = random.Random(4)
    scenes = [random_motion_scene(rng) for _ in range(20)]
    videos = _bytes(draw(motion_drawings(scenes), height=96, width=96, num_frames=17))
    for scene, video in zip(scenes, videos, strict=True):
        assert all(check_motion(scene, [look_at(frame) for frame in video]).values()), scene


def test_the_judge_fails_a_picture_of_something_else() -> None:
    rng = random.Random(5)
    scenes = [random_scene(rng) for _ in range(20)]
    pictures = _bytes(draw(still_drawings(scenes), height=96, width=96)[:, :, 0])
    shifted = zip(scenes, np.roll(pictures, 1, axis=0), strict=True)
    assert sum(check_still(scene, look_at(pixels))["shape and colour"] for scene, pixels in shifted) <= 2
