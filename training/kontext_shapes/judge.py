"""Says whether an edited picture shows what was asked for, and whether it kept what was not asked for.

Both are read off the pictures by `training.judge`: the one before the edit, the result, and the drawing that the edit
asks for, which says where and how large things should be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from training.judge import Picture, SeenShape, place_of, size_of
from training.shapes.boards import Piece
from training.shapes.edits import Edit
from training.shapes.instructions import Instruction
from training.shapes.scenes import PLACES

NEAR = 0.06  # of the picture's side
NEAR_RESIZED = 0.12  # a shape at the edge moves inwards as it grows
ALIKE = 1.18  # ratio of two radii
RESIZED = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One edit and what the three pictures show."""

    edit: Edit
    said: Instruction
    before: Picture
    wanted: Picture
    result: Picture


def _like(piece: Piece | None, picture: Picture) -> SeenShape | None:
    """Return the first shape in the picture with the piece's shape and colour."""
    if piece is None:
        return None
    return next((s for s in picture.shapes if (s.shape, s.colour) == (piece.shape, piece.colour)), None)


def _apart(first: SeenShape, second: SeenShape) -> float:
    return math.hypot(first.x - second.x, first.y - second.y)


def _ratio(first: SeenShape, second: SeenShape) -> float:
    return max(first.radius / second.radius, second.radius / first.radius)


def _nearest(wanted: SeenShape, picture: Picture, limit: float) -> SeenShape | None:
    near = [shape for shape in picture.shapes if _apart(shape, wanted) < limit]
    return min(near, key=lambda shape: _apart(shape, wanted), default=None)


def _is_at(seen: SeenShape, place: str) -> bool:
    """Return whether the shape is at the place, or at its side where the place is a side."""
    column, row = PLACES[place]
    seen_column, seen_row = place_of(seen)
    if place == "centre":
        return (seen_column, seen_row) == (0, 0)
    return column in (0, seen_column) and row in (0, seen_row)


def _added(judged: Judged, new: SeenShape) -> bool:
    made = judged.said.made
    placed = made.place is None or place_of(new) == PLACES[made.place]
    return placed and (made.size is None or size_of(new) == made.size)


def _moved(judged: Judged, new: SeenShape) -> bool:
    assert judged.edit.place is not None
    return _is_at(new, judged.edit.place)


def _resized(judged: Judged, new: SeenShape) -> bool:
    old = _like(judged.edit.old, judged.before)
    assert old is not None
    growth = new.radius / old.radius
    return growth > RESIZED if judged.said.made.size == "large" else growth < 1 / RESIZED


_DONE: dict[str, Callable[[Judged, SeenShape], bool]] = {"add": _added, "move": _moved, "resize": _resized}


def is_done(judged: Judged) -> bool:
    """Return whether the result shows what was asked for."""
    edit, result = judged.edit, judged.result
    if edit.kind == "background":
        return result.background == edit.after.background
    if edit.kind == "remove":
        old = _like(edit.old, judged.before)
        assert old is not None
        return _like(edit.old, result) is None and _nearest(old, result, NEAR_RESIZED) is None
    new = _like(edit.new, result)
    if new is None or edit.kind not in _DONE:
        return new is not None
    return _DONE[edit.kind](judged, new)


def _others_kept(judged: Judged) -> bool:
    """Return whether all other shapes are as they were, where they were."""
    others = [piece for slot, piece in enumerate(judged.edit.before.slots) if piece and slot != judged.edit.slot]
    for piece in others:
        old, seen = _like(piece, judged.before), _like(piece, judged.result)
        assert old is not None
        if seen is None or _apart(old, seen) > NEAR or _ratio(old, seen) > ALIKE:
            return False
    return len(judged.result.shapes) - len(others) <= (judged.edit.slot is not None)


def _rest_of_piece_kept(judged: Judged) -> bool:
    """Return whether the changed piece kept its other properties."""
    edit, result = judged.edit, judged.result
    old, wanted = edit.old, _like(edit.new, judged.wanted)
    if old is None or wanted is None:  # it came or went: nothing is left to keep
        return True
    if edit.kind == "move":
        seen = _like(old, result)
        assert edit.place is not None
        column, row = PLACES[edit.place]
        sides = [] if edit.place == "centre" else [name for name, side in (("x", column), ("y", row)) if not side]
        return (
            seen is not None
            and _ratio(seen, wanted) < ALIKE
            and all(abs(getattr(seen, side) - getattr(wanted, side)) < NEAR for side in sides)
        )
    seen = _nearest(wanted, result, NEAR_RESIZED if edit.kind == "resize" else NEAR)
    if seen is None:
        return False
    same_shape, same_colour = edit.kind != "reshape", old.colour == (edit.new or old).colour
    return (
        (not same_shape or seen.shape == old.shape)
        and (not same_colour or seen.colour == old.colour)
        and (edit.kind == "resize" or seen.shape != wanted.shape or _ratio(seen, wanted) < ALIKE)
    )


def is_kept(judged: Judged) -> bool:
    """Return whether the result shows all that the edit leaves alone, unchanged, and nothing else."""
    background = judged.edit.kind == "background" or judged.result.background == judged.before.background
    return background and _others_kept(judged) and _rest_of_piece_kept(judged)


def check_edit(judged: Judged) -> dict[str, bool]:
    """Return what the edit did: as a whole, and by the kind of the edit."""
    done, kept = is_done(judged), is_kept(judged)
    kind = judged.edit.kind
    return {"done": done, "kept": kept, "both": done and kept, f"done ({kind})": done, f"kept ({kind})": kept}
