"""Pictures that are edited: boards of up to three shapes, whose numbers stay as they are but for what an edit says.

A piece keeps its slot on the board and the ranges that its numbers are drawn from, so that with the same chance
(`draw.Chance`) whatever an edit does not touch is drawn alike before and after it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch

from training.shapes.draw import ABSENT, PAIR_RADII, RADII, Drawings, Range, around, still
from training.shapes.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZES, far_apart

NUM_SLOTS = 3
SPREAD = 0.03
WIDE: Range = (0.38, 0.62)
WIDE_SHARE = 0.5  # of the pairs that lie opposite each other
ALONE_SHARE = 0.5  # of the single pieces, that may be as large as a picture's only shape
COUNTS = (0.3, 0.4, 0.3)  # shares of boards with one, two and three pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One shape. `x` and `y` are the ranges of its centre, fractions of width and height.

    An `alone` piece is the only one of its board and may be larger.
    """

    shape: str
    colour: str
    size: str
    column: int
    row: int
    x: Range
    y: Range
    alone: bool = False

    @property
    def place(self) -> str:
        """The one of `PLACES` that the piece is at."""
        return next(name for name, where in PLACES.items() if where == (self.column, self.row))

    @property
    def radius(self) -> Range:
        return (RADII if self.alone else PAIR_RADII)[self.size]

    def at(self, column: int, row: int) -> "Piece":
        """Return the piece in this third of the picture. Its range stays in a direction in which it does not move."""
        x = self.x if column == self.column else around(column, SPREAD)
        y = self.y if row == self.row else around(row, SPREAD)
        return replace(self, column=column, row=row, x=x, y=y)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """A picture: pieces in their slots (None: an empty one) on a background."""

    slots: tuple[Piece | None, ...]
    background: str

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.slots if piece is not None)

    def with_piece(self, slot: int, piece: Piece | None) -> "Board":
        return replace(self, slots=(*self.slots[:slot], piece, *self.slots[slot + 1 :]))

    def is_clear(self) -> bool:
        """Return whether pieces can be told from the background and from each other, and do not touch."""
        looks = [(piece.shape, piece.colour) for piece in self.pieces]
        places = [piece.place for piece in self.pieces]
        return (
            all(piece.colour != self.background for piece in self.pieces)
            and len(set(looks)) == len(looks)
            and all(far_apart(*pair) for pair in combinations(places, 2))
        )


def piece_at(place: str, rng: random.Random) -> Piece:
    """Return any piece at one of `PLACES`."""
    column, row = PLACES[place]
    return Piece(
        shape=rng.choice(SHAPES),
        colour=rng.choice(COLOURS),
        size=rng.choice(SIZES),
        column=column,
        row=row,
        x=around(column, SPREAD),
        y=around(row, SPREAD),
    )


def _loosened(piece: Piece) -> Piece:
    """Return a piece at one side anywhere along this side, as pairs by relation are drawn."""
    return replace(piece, x=WIDE if piece.column == 0 else piece.x, y=WIDE if piece.row == 0 else piece.y)


def _opposite(pieces: list[Piece]) -> bool:
    return len(pieces) == 2 and sum(piece.column for piece in pieces) == sum(piece.row for piece in pieces) == 0


@cache
def _far_places(count: int) -> tuple[tuple[str, ...], ...]:
    """Return all sets of so many places of which every two are far apart."""
    sets = combinations(PLACES, count)
    return tuple(places for places in sets if all(far_apart(*pair) for pair in combinations(places, 2)))


def random_board(rng: random.Random, num_pieces: int | None = None) -> Board:
    """Return any clear board with so many pieces, or with one to three."""
    num_pieces = num_pieces or rng.choices((1, 2, 3), COUNTS)[0]
    while True:
        pieces = [piece_at(place, rng) for place in rng.choice(_far_places(num_pieces))]
        if _opposite(pieces) and rng.random() < WIDE_SHARE:
            pieces = [_loosened(piece) for piece in pieces]
        if len(pieces) == 1 and rng.random() < ALONE_SHARE:
            pieces = [replace(pieces[0], alone=True)]
        slots: list[Piece | None] = [*pieces, *[None] * (NUM_SLOTS - num_pieces)]
        rng.shuffle(slots)
        board = Board(slots=tuple(slots), background=rng.choice(BACKGROUNDS))
        if board.is_clear():
            return board


def board_drawings(boards: list[Board]) -> Drawings:
    """Return the tensors that `draw` turns into pictures."""

    def rows(of_piece: Callable[[Piece], Any], empty: Any) -> list[list[Any]]:
        return [[empty if piece is None else of_piece(piece) for piece in board.slots] for board in boards]

    return Drawings(
        shape_NI=torch.tensor(rows(lambda piece: SHAPES.index(piece.shape), 0), dtype=torch.int8),
        colour_NI=torch.tensor(rows(lambda piece: COLOURS.index(piece.colour), 0), dtype=torch.int8),
        ranges_NIP2=torch.tensor(rows(lambda piece: still(piece.x, piece.y, piece.radius), ABSENT)),
        background_N=torch.tensor([BACKGROUNDS.index(board.background) for board in boards], dtype=torch.int8),
    )
