"""Finds what a picture or a video shows by plain image analysis: no learned part, nothing shared with the drawing code.

Pixels that differ from the background are grouped into components. A component's shape is read from its outline seen
from its centre, r(angle): a circle has none of the harmonics 3, 4 and 5; triangle, square and star each have their own.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from training.shapes.draw import PALETTE
from training.shapes.scenes import COLOURS

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
_HARMONIC_SHAPES = {3: "triangle", 4: "square", 5: "star"}
_NUM_ANGLES = 180
_CIRCLE_BELOW = 0.06
_MIN_CONTRAST = 0.2
_MIN_AREA = 0.002
_BIG = 0.117  # radius of equal area: small shapes have up to 0.11, large ones (a triangle of a pair) from 0.124


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenShape:
    """One shape found in a picture. `x` and `y` are fractions of width and height, `radius` (of the circle of equal
    area) of the shorter side; `angle` (radians) is known up to the shape's symmetry and 0 for a circle."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Background and shapes found in a picture."""

    background: str
    shapes: tuple[SeenShape, ...]


def colour_name(rgb: Floats, names: tuple[str, ...]) -> str:
    """Return the name of the nearest palette colour."""
    return min(names, key=lambda name: float(np.linalg.norm(rgb - np.array(PALETTE[name]))))


def _background(image: Floats) -> Floats:
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    median: Floats = np.median(border, axis=0)
    return median


def _profile(cover: Floats, x: float, y: float) -> Floats:
    """Return the outline radius in pixels at each angle: how much of each ray from the centre is covered."""
    angles = np.linspace(0, 2 * np.pi, _NUM_ANGLES, endpoint=False)
    radii = np.arange(0, max(cover.shape) * 0.75, 0.25)
    rows, columns = y + np.outer(np.sin(angles), radii), x + np.outer(np.cos(angles), radii)
    lengths: Floats = ndimage.map_coordinates(cover, (rows, columns), order=1).sum(axis=1) * 0.25
    return lengths


def _shape(profile: Floats) -> tuple[str, float]:
    spectrum = np.fft.rfft(profile / profile.mean()) * 2 / _NUM_ANGLES
    harmonic = max(_HARMONIC_SHAPES, key=lambda k: float(abs(spectrum[k])))
    if abs(spectrum[harmonic]) < _CIRCLE_BELOW:
        return "circle", 0.0
    return _HARMONIC_SHAPES[harmonic], float(-np.angle(spectrum[harmonic]) / harmonic)


def _seen_shape(image: Floats, ground: Floats, mask: Mask) -> SeenShape:
    height, width = mask.shape
    core = ndimage.binary_erosion(mask, iterations=2)
    paint: Floats = np.median(image[core if core.any() else mask], axis=0)
    span = paint - ground
    near = ndimage.binary_dilation(mask, iterations=2)
    cover: Floats = np.clip((image - ground) @ span / (span @ span), 0, 1) * near
    y, x = ndimage.center_of_mass(cover)
    shape, angle = _shape(_profile(cover, x, y))
    return SeenShape(
        shape=shape,
        colour=colour_name(paint, COLOURS),
        x=float(x + 0.5) / width,
        y=float(y + 0.5) / height,
        radius=math.sqrt(cover.sum() / math.pi) / min(height, width),
        angle=angle,
    )


def look_at(pixels: Pixels) -> Picture:
    """Return what a picture (height, width, 3) shows, biggest shape first."""
    image = pixels.astype(np.float64) / 255
    ground = _background(image)
    mask = np.linalg.norm(image - ground, axis=-1) > _MIN_CONTRAST
    labels, _ = ndimage.label(mask)
    sizes = np.bincount(labels.ravel())[1:]
    numbers = [label + 1 for label in np.argsort(sizes)[::-1] if sizes[label] > _MIN_AREA * mask.size]
    shapes = tuple(_seen_shape(image, ground, labels == number) for number in numbers)
    return Picture(background=colour_name(ground, tuple(PALETTE)), shapes=shapes)


def size_of(seen: SeenShape) -> str:
    """Return "small" or "large", by radius."""
    return "large" if seen.radius > _BIG else "small"


def place_of(seen: SeenShape) -> tuple[int, int]:
    """Return column and row of the third of the picture that holds the centre: each -1, 0 or 1."""

    def third(value: float) -> int:
        return -1 if value < 0.4 else 1 if value > 0.6 else 0

    return third(seen.x), third(seen.y)


def _turned(angles: list[float], symmetry: int) -> float:
    """Return the total rotation in radians; each frame's change counts modulo the shape's symmetry."""
    period = 2 * math.pi / symmetry
    steps = [after - before for before, after in pairwise(angles)]
    return sum((step + period / 2) % period - period / 2 for step in steps)


def motion_of(frames: list[Picture]) -> str:
    """Return one of `scenes.MOTIONS`, "still", or "lost" where a frame shows no shape. It follows each frame's
    biggest shape."""
    if not all(frame.shapes for frame in frames):
        return "lost"
    track = [frame.shapes[0] for frame in frames]
    dx, dy = track[-1].x - track[0].x, track[-1].y - track[0].y
    if max(abs(dx), abs(dy)) > 0.2:
        across = abs(dx) > abs(dy)
        return ("right" if dx > 0 else "left") if across else ("down" if dy > 0 else "up")
    growth = track[-1].radius / track[0].radius
    if not 0.75 < growth < 1.33:
        return "grow" if growth > 1 else "shrink"
    symmetry = next((k for k, name in _HARMONIC_SHAPES.items() if name == track[0].shape), 0)
    if symmetry and abs(_turned([seen.angle for seen in track], symmetry)) > math.radians(30):
        return "turn"
    return "still"
