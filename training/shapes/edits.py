"""Edits of pictures: an edit changes one board into another.

Held out of training are some combinations of an edit's kind, the shape and colour that it changes, and what it makes of
them. Wording is apart (`instructions`), with held-out phrasings of its own.
"""

import random
from dataclasses import dataclass, replace

from training.shapes.boards import Board, Piece, random_board
from training.shapes.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, draw_until, held_out

KINDS = ("recolour", "move", "remove", "add", "resize", "reshape", "background")
WEIGHTS = (20, 28, 10, 18, 10, 12, 8)
RECOLOURED_SHARE = 0.3  # of the pieces that get another shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One edit of the piece in `slot` (None: of the background). A move has the `place` to move to: one side alone
    ("left") changes the column or the row, and the other stays."""

    kind: str
    before: Board
    after: Board
    slot: int | None = None
    place: str | None = None

    @property
    def old(self) -> Piece | None:
        """The piece that changes, before the edit; None if there was none."""
        return None if self.slot is None else self.before.slots[self.slot]

    @property
    def new(self) -> Piece | None:
        """The piece that changes, after the edit; None if it is gone."""
        return None if self.slot is None else self.after.slots[self.slot]


def moved_to(piece: Piece, place: str) -> Piece:
    """Return the piece moved as `Edit.place` says."""
    column, row = PLACES[place]
    if place == "centre":
        return piece.at(0, 0)
    return piece.at(column or piece.column, row or piece.row)


def _other(values: tuple[str, ...], value: str, rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])


def _resized(size: str, rng: random.Random) -> str:
    return {"small": "large", "large": "small"}.get(size) or rng.choice(("small", "large"))


def _changed(kind: str, piece: Piece, rng: random.Random) -> Piece | None:
    """Return what one of the kinds that change one piece makes of it. A new colour may be the background's."""
    if kind == "recolour":
        return replace(piece, colour=_other(COLOURS, piece.colour, rng))
    if kind == "resize":
        return replace(piece, size=_resized(piece.size, rng))
    if kind == "reshape":
        colour = rng.choice(COLOURS) if rng.random() < RECOLOURED_SHARE else piece.colour
        return replace(piece, shape=_other(SHAPES, piece.shape, rng), colour=colour)
    assert kind == "remove"
    return None


def _any_edit(kind: str, rng: random.Random) -> Edit:
    """Return an edit of this kind whose result may be unclear, or the picture that was there before."""
    board = random_board(rng)
    if kind == "background":
        after = replace(board, background=_other(BACKGROUNDS, board.background, rng))
        return Edit(kind=kind, before=board, after=after)
    slot = rng.choice([slot for slot, piece in enumerate(board.slots) if piece is not None])
    if kind == "add":
        return Edit(kind=kind, before=board.with_piece(slot, None), after=board, slot=slot)
    piece = board.slots[slot]
    assert piece is not None
    place = rng.choice(tuple(PLACES)) if kind == "move" else None
    changed = moved_to(piece, place) if place else _changed(kind, piece, rng)
    return Edit(kind=kind, before=board, after=board.with_piece(slot, changed), slot=slot, place=place)


def random_edit(rng: random.Random) -> Edit:
    """Return any edit, held out or not, that changes a clear picture into another clear one."""
    kind = rng.choices(KINDS, WEIGHTS)[0]
    while True:
        edit = _any_edit(kind, rng)
        if edit.after != edit.before and edit.after.is_clear():
            return edit


def is_held_out_edit(edit: Edit) -> bool:
    """Return whether the edit is one of those combinations that training never shows."""
    if edit.slot is None:
        return held_out(edit.kind, edit.before.background, edit.after.background)
    piece = edit.old or edit.new
    assert piece is not None
    made = edit.new or piece
    value = {"recolour": made.colour, "reshape": made.shape, "resize": made.size}.get(edit.kind, made.place)
    return held_out(edit.kind, piece.shape, piece.colour, value)


def training_edit(rng: random.Random) -> Edit:
    """Return an edit that training may show."""
    return draw_until(rng, random_edit, lambda edit: not is_held_out_edit(edit))


def held_out_edit(rng: random.Random) -> Edit:
    """Return an edit that training never shows."""
    return draw_until(rng, random_edit, is_held_out_edit)
