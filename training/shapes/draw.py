"""Anti-aliased drawing of many scenes at once, from signed distances (iquilezles.org/articles/distfunctions2d).

Every number of a drawing is a range, sampled anew each time: x, y, radius, angle of an item and how each changes over
the clip. Positions are fractions of width and height, radii of the shorter side.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from training.shapes.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, Item, MotionScene, Scene

PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.13, 0.15),
    "green": (0.13, 0.66, 0.25),
    "blue": (0.13, 0.30, 0.90),
    "yellow": (0.98, 0.87, 0.15),
    "purple": (0.56, 0.18, 0.72),
    "orange": (0.98, 0.52, 0.08),
    "white": (0.97, 0.97, 0.97),
    "black": (0.05, 0.05, 0.05),
    "grey": (0.55, 0.55, 0.55),
}
COLOUR_JITTER = 0.02
MARGIN = 0.02
OUTER = 1.25  # outer radius of triangle and star, per radius of the circle of like size
RADII = {"small": (0.09, 0.11), "medium": (0.13, 0.16), "large": (0.19, 0.225)}
PAIR_RADII = {"small": (0.09, 0.11), "medium": (0.12, 0.14), "large": (0.155, 0.18)}
_MOTION_RADII = {"small": (0.10, 0.12), "medium": (0.14, 0.16), "large": (0.18, 0.20)}
Range = tuple[float, float]
STILL: Range = (0.0, 0.0)
ABSENT: tuple[Range, ...] = (STILL, STILL, (-1.0, -1.0), *(STILL,) * 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawings:
    """N drawings of I items. The 8 parameters P are x, y, radius, angle (radians) and their changes over the clip."""

    shape_NI: Tensor
    colour_NI: Tensor
    ranges_NIP2: Tensor
    background_N: Tensor

    def __getitem__(self, index: Tensor) -> "Drawings":
        return Drawings(
            shape_NI=self.shape_NI[index],
            colour_NI=self.colour_NI[index],
            ranges_NIP2=self.ranges_NIP2[index],
            background_N=self.background_N[index],
        )

    def to(self, device: torch.device | str) -> "Drawings":
        return Drawings(
            shape_NI=self.shape_NI.to(device),
            colour_NI=self.colour_NI.to(device),
            ranges_NIP2=self.ranges_NIP2.to(device),
            background_N=self.background_N.to(device),
        )


def around(side: int, spread: float) -> Range:
    return 0.5 + 0.27 * side - spread, 0.5 + 0.27 * side + spread


def still(x: Range, y: Range, radius: Range) -> tuple[Range, ...]:
    return (x, y, radius, *(STILL,) * 5)


def item_ranges(scene: Scene) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges of the 8 parameters of each item of a still scene."""
    radii = RADII if len(scene.items) == 1 else PAIR_RADII
    if scene.relation is not None:
        spread: Range = (0.38, 0.62)
        ends = [(spread, around(side, 0.03)) for side in (-1, 1)]
        ends = [(y, x) for x, y in ends] if scene.relation == "left of" else ends
    else:
        ends = [tuple(around(side, 0.03) for side in PLACES[item.place or "centre"]) for item in scene.items]  # type: ignore[misc]
    return tuple(still(x, y, radii[item.size]) for (x, y), item in zip(ends, scene.items, strict=True))


def motion_ranges(scene: MotionScene) -> tuple[Range, ...]:
    """Return the ranges of the moving item's 8 parameters."""
    middle, wide, radius = (0.44, 0.56), (0.34, 0.66), _MOTION_RADII[scene.item.size]
    start, end, far = (0.22, 0.27), (0.73, 0.78), (0.46, 0.54)
    back = (-far[1], -far[0])
    full_turn = (math.radians(80), math.radians(115))
    table: dict[str, tuple[Range, ...]] = {
        "left": (end, wide, radius, STILL, back, STILL, STILL, STILL),
        "right": (start, wide, radius, STILL, far, STILL, STILL, STILL),
        "up": (wide, end, radius, STILL, STILL, back, STILL, STILL),
        "down": (wide, start, radius, STILL, STILL, far, STILL, STILL),
        "grow": (middle, middle, (0.08, 0.10), STILL, STILL, STILL, (0.13, 0.16), STILL),
        "shrink": (middle, middle, (0.22, 0.25), STILL, STILL, STILL, (-0.15, -0.12), STILL),
        "turn": (middle, middle, RADII[scene.item.size], (-0.3, 0.3), STILL, STILL, STILL, full_turn),
    }
    return table[scene.motion]


def _drawings(
    items: list[tuple[Item, ...]], ranges: list[tuple[tuple[Range, ...], ...]], grounds: list[str]
) -> Drawings:
    most = max(len(group) for group in items)
    shape = [[SHAPES.index(item.shape) for item in group] + [0] * (most - len(group)) for group in items]
    colour = [[COLOURS.index(item.colour) for item in group] + [0] * (most - len(group)) for group in items]
    padded = [[*group, *(ABSENT,) * (most - len(group))] for group in ranges]
    return Drawings(
        shape_NI=torch.tensor(shape, dtype=torch.int8),
        colour_NI=torch.tensor(colour, dtype=torch.int8),
        ranges_NIP2=torch.tensor(padded, dtype=torch.float32),
        background_N=torch.tensor([BACKGROUNDS.index(ground) for ground in grounds], dtype=torch.int8),
    )


def still_drawings(scenes: list[Scene]) -> Drawings:
    """Return the tensors that `draw` turns into pictures."""
    return _drawings([s.items for s in scenes], [item_ranges(s) for s in scenes], [s.background for s in scenes])


def motion_drawings(scenes: list[MotionScene]) -> Drawings:
    """Return the tensors that `draw` turns into videos."""
    return _drawings([(s.item,) for s in scenes], [(motion_ranges(s),) for s in scenes], [s.background for s in scenes])


def _star(x: Tensor, y: Tensor, radius: Tensor, inner: float = 0.45) -> Tensor:
    kx, ky = math.cos(math.pi / 5), -math.sin(math.pi / 5)
    x = x.abs()
    for side in (kx, -kx):
        fold = 2 * (side * x + ky * y).clamp(min=0)
        x, y = x - fold * side, y - fold * ky
    x, y = x.abs(), y - radius
    edge_x, edge_y = -inner * ky, inner * kx - 1
    along = ((x * edge_x + y * edge_y) / (edge_x**2 + edge_y**2)).clamp(min=0).minimum(radius)
    distance = torch.hypot(x - edge_x * along, y - edge_y * along)
    return torch.copysign(distance, y * edge_x - x * edge_y)


def _triangle(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    slant = math.sqrt(0.75) * x.abs() + 0.5 * y
    return torch.maximum(-y, slant) - 0.5 * radius


def _distance(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Return the signed distance to the shape's edge; x to the right, y upwards, all in pixels."""
    square = torch.maximum(x.abs(), y.abs()) - 0.89 * radius
    distance = torch.where(shape == 0, torch.hypot(x, y) - radius, square)
    distance = torch.where(shape == 2, _triangle(x, y, OUTER * radius), distance)
    return torch.where(shape == 3, _star(x, y, OUTER * radius), distance)


def _inside(centre: Tensor, radius: Tensor, side_px: int, short_px: int) -> Tensor:
    room = (OUTER * radius * short_px / side_px + MARGIN).clamp(0, 0.5)
    return torch.minimum(torch.maximum(centre, room), 1 - room)


@cache
def _table(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Return the colours (names, 3), kept on the device: a copy to it cannot be part of a CUDA graph."""
    return torch.tensor([PALETTE[name] for name in names], device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chance:
    """Random choices of a drawing as numbers in [0, 1): the place of each parameter in its range, and each colour's
    difference from the palette. Two drawings with the same chance look alike where they say the same."""

    parameters_NIP: Tensor
    colours_NI3: Tensor
    background_N3: Tensor

    @classmethod
    def of(cls, drawings: Drawings, generator: torch.Generator | None = None) -> "Chance":
        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=drawings.shape_NI.device, generator=generator)

        items = drawings.shape_NI.shape
        return cls(
            parameters_NIP=uniform(*drawings.ranges_NIP2.shape[:-1]),
            colours_NI3=uniform(*items, 3),
            background_N3=uniform(items[0], 3),
        )


def _colours(index: Tensor, names: tuple[str, ...], chance: Tensor) -> Tensor:
    rgb = _table(names, index.device)[index.long()]
    return (rgb + COLOUR_JITTER * (2 * chance - 1)).clamp(0, 1)


def draw(
    drawings: Drawings,
    *,
    height: int,
    width: int,
    num_frames: int = 1,
    generator: torch.Generator | None = None,
    chance: Chance | None = None,
) -> Tensor:
    """Return videos (N, 3, frames, height, width) in [-1, 1], on the drawings' device. Random choices come from
    `chance`, or else from the generator."""
    device, short = drawings.shape_NI.device, min(height, width)
    chance = chance or Chance.of(drawings, generator)
    low, high = drawings.ranges_NIP2.unbind(-1)
    values = low + (high - low) * chance.parameters_NIP
    time_F = torch.linspace(0, 1, num_frames, device=device) if num_frames > 1 else torch.zeros(1, device=device)
    x, y, radius, angle = (values[..., :4, None] + values[..., 4:, None] * time_F).unbind(2)
    x, y = _inside(x, radius, width, short), _inside(y, radius, height, short)
    column = torch.arange(width, device=device) + 0.5
    row = (torch.arange(height, device=device) + 0.5)[:, None]
    x, y, radius, angle = (value[..., None, None] for value in (x, y, radius, angle))
    right, up = column - x * width, y * height - row
    across, along = angle.cos() * right - angle.sin() * up, angle.sin() * right + angle.cos() * up
    shape = drawings.shape_NI[..., None, None, None]
    cover_NIFHW = (0.5 - _distance(shape, across, along, radius * short)).clamp(0, 1) * (radius > 0)
    paint = _colours(drawings.colour_NI, COLOURS, chance.colours_NI3)
    canvas = _colours(drawings.background_N, BACKGROUNDS, chance.background_N3)[:, :, None, None, None]
    for item in range(cover_NIFHW.shape[1]):
        cover = cover_NIFHW[:, item].unsqueeze(1)
        canvas = canvas + (paint[:, item, :, None, None, None] - canvas) * cover
    return canvas * 2 - 1
