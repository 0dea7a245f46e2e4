"""Scenes of coloured shapes, and the split that keeps some combinations out of training.

A scene is fully decided (size, place, background); a caption may leave parts of it unsaid. Held-out combinations are
(shape, colour, place) for a placed object, (object, relation, object) for a pair and (shape, colour, motion) for a
video. No training picture shows one of them, whatever its caption says.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
BACKGROUNDS = (*COLOURS, "grey")
SIZES = ("small", "medium", "large")
MOTIONS = ("left", "right", "up", "down", "grow", "shrink", "turn")
RELATIONS = ("above", "left of")  # "A below B" is "B above A": one canonical form, so no mirror image leaks
PLACES: dict[str, tuple[int, int]] = {
    "centre": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
HELD_OUT_ONE_IN = 10
MIX = (0.5, 0.88)  # cumulative shares of one item, a pair by relation; the rest are pairs by two places
TRAINING_MIX = (0.2, 0.57)
FAINT = ({"blue", "grey"}, {"purple", "grey"}, {"blue", "purple"}, {"red", "orange"}, {"yellow", "orange"})
SHOWN_SHARES = {"small": 1.0, "medium": 0.7, "large": 0.5}  # of videos that are drawn by chance, by size
EASY_SHARE = 0.6  # of those whose colours lie far apart
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One shape. `place` is None where a relation places it."""

    shape: str
    colour: str
    size: str
    place: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A still picture of one or two items. With a relation, the first item is above (left of) the second."""

    items: tuple[Item, ...]
    background: str
    relation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MotionScene:
    """A video of one item that moves, grows, shrinks or turns."""

    item: Item
    background: str
    motion: str


def held_out(*key: str) -> bool:
    """Return whether a combination of properties is one that training never shows."""
    return zlib.crc32("|".join(key).encode()) % HELD_OUT_ONE_IN == 0


def is_held_out(scene: Scene) -> bool:
    """Return whether the picture shows a combination that training never shows."""
    placed = any(held_out(item.shape, item.colour, item.place) for item in scene.items if item.place is not None)
    if scene.relation is None:
        return placed
    first, second = scene.items
    return placed or held_out(first.shape, first.colour, scene.relation, second.shape, second.colour)


def is_held_out_motion(scene: MotionScene) -> bool:
    """Return whether the video shows a combination of shape, colour and motion that training never shows."""
    return held_out(scene.item.shape, scene.item.colour, scene.motion)


def _random_item(rng: random.Random, place: str | None = None) -> Item:
    return Item(shape=rng.choice(SHAPES), colour=rng.choice(COLOURS), size=rng.choice(SIZES), place=place)


def _random_background(rng: random.Random, items: tuple[Item, ...]) -> str:
    used = {item.colour for item in items}
    return rng.choice([colour for colour in BACKGROUNDS if colour not in used])


def _random_pair(rng: random.Random, places: tuple[str | None, str | None]) -> tuple[Item, Item]:
    while True:
        first, second = _random_item(rng, places[0]), _random_item(rng, places[1])
        if (first.shape, first.colour) != (second.shape, second.colour):
            return first, second


def far_apart(first: str, second: str) -> bool:
    """Return whether two places lie on opposite sides, so that shapes drawn there cannot touch."""
    (x0, y0), (x1, y1) = PLACES[first], PLACES[second]
    return abs(x0 - x1) == 2 or abs(y0 - y1) == 2


def _far_places(rng: random.Random) -> tuple[str, str]:
    while True:
        first, second = rng.sample(tuple(PLACES), 2)
        if far_apart(first, second):
            return first, second


def random_scene(rng: random.Random, mix: tuple[float, float] = MIX) -> Scene:
    """Return any scene, held out or not: one item, a pair by relation, or a pair by two places."""
    kind = rng.random()
    if kind < mix[0]:
        items: tuple[Item, ...] = (_random_item(rng, rng.choice(tuple(PLACES))),)
        return Scene(items=items, background=_random_background(rng, items))
    relation = rng.choice(RELATIONS) if kind < mix[1] else None
    items = _random_pair(rng, (None, None) if relation else _far_places(rng))
    return Scene(items=items, background=_random_background(rng, items), relation=relation)


def random_motion_scene(rng: random.Random) -> MotionScene:
    """Return any video scene, held out or not. A circle never turns, since that would be invisible."""
    item, motion = _random_item(rng), rng.choice(MOTIONS)
    while motion == "turn" and item.shape == "circle":
        item = _random_item(rng)
    return MotionScene(item=item, background=_random_background(rng, (item,)), motion=motion)


def draw_until(rng: random.Random, make: Callable[[random.Random], S], keep: Callable[[S], bool]) -> S:
    """Return the first result of `make` that `keep` accepts."""
    while not keep(scene := make(rng)):
        pass
    return scene


def training_scene(rng: random.Random) -> Scene:
    """Return a scene that training may show. Most show two shapes, which are harder to learn than one, most of all by
    a place each."""
    return draw_until(rng, lambda rng: random_scene(rng, TRAINING_MIX), lambda scene: not is_held_out(scene))


def held_out_scene(rng: random.Random) -> Scene:
    """Return a scene that training never shows."""
    return draw_until(rng, random_scene, is_held_out)


def training_motion_scene(rng: random.Random) -> MotionScene:
    """Return a video scene that training may show. Small shapes, and colours that hardly differ from the background's,
    are harder to learn and come more often."""

    def is_kept(scene: MotionScene) -> bool:
        share = SHOWN_SHARES[scene.item.size]
        if {scene.item.colour, scene.background} not in FAINT:
            share *= EASY_SHARE
        return rng.random() < share and not is_held_out_motion(scene)

    return draw_until(rng, random_motion_scene, is_kept)


def held_out_motion_scene(rng: random.Random) -> MotionScene:
    """Return a video scene that training never shows."""
    return draw_until(rng, random_motion_scene, is_held_out_motion)
