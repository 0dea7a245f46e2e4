"""An edit changes what it names, the rest is drawn alike before and after, and the split holds."""

import random

import pytest
import torch

from training.kontext_shapes.data import draw_pair
from training.shapes.boards import board_drawings, piece_at, random_board
from training.shapes.edits import KINDS, Edit, held_out_edit, is_held_out_edit, moved_to, random_edit, training_edit
from training.shapes.scenes import PLACES


def _edits(count: int = 400, seed: int = 0) -> list[Edit]:
    rng = random.Random(seed)
    return [random_edit(rng) for _ in range(count)]


def test_every_kind_comes_and_every_number_of_shapes() -> None:
    edits = _edits()
    assert {edit.kind for edit in edits} == set(KINDS)
    assert {len(edit.before.pieces) for edit in edits} == {0, 1, 2, 3}


def test_an_edit_goes_from_one_clear_picture_to_another() -> None:
    for edit in _edits():
        assert edit.before.is_clear()
        assert edit.after.is_clear()
        assert edit.before != edit.after


def test_only_the_slot_of_the_edit_changes() -> None:
    for edit in _edits():
        same = [
            slot
            for slot, pair in enumerate(zip(edit.before.slots, edit.after.slots, strict=True))
            if pair[0] == pair[1]
        ]
        assert len(same) == 3 if edit.slot is None else edit.slot not in same and len(same) == 2
        assert (edit.before.background == edit.after.background) == (edit.kind != "background")


def _key(edit: Edit) -> tuple[object, ...]:
    """Return the held-out key, written out anew: kind, shape and colour of the piece, and its change."""
    if edit.slot is None:
        return edit.before.background, edit.after.background
    piece, made = edit.old or edit.new, edit.new or edit.old
    assert piece
    assert made
    values = {"recolour": made.colour, "reshape": made.shape, "resize": made.size}
    return edit.kind, piece.shape, piece.colour, values.get(edit.kind, (made.column, made.row))


def test_training_and_held_out_edits_never_meet() -> None:
    rng = random.Random(1)
    trained = {_key(training_edit(rng)) for _ in range(6_000)}
    held_out = [held_out_edit(rng) for _ in range(300)]
    assert all(is_held_out_edit(edit) for edit in held_out)
    assert not trained & {_key(edit) for edit in held_out}


@pytest.mark.parametrize(
    ("start", "to", "end"),
    [("top left", "right", "top right"), ("left", "top", "top left"), ("bottom", "top right", "top right"),
     ("top right", "centre", "centre"), ("centre", "bottom", "bottom")],
)  # fmt: skip
def test_a_move_to_a_side_keeps_the_row_or_the_column(start: str, to: str, end: str) -> None:
    piece = piece_at(start, random.Random(0))
    moved = moved_to(piece, to)
    assert moved.place == end
    for side, free in (("x", PLACES[to][0]), ("y", PLACES[to][1])):
        assert (getattr(moved, side) == getattr(piece, side)) == (free == 0 and to != "centre")


def test_what_an_edit_leaves_is_drawn_alike() -> None:
    """Pixels near an unchanged shape are equal in both pictures, and both differ somewhere."""
    edits = [edit for edit in _edits(60, seed=2) if edit.kind != "background"]
    before, after = (board_drawings([getattr(edit, name) for edit in edits]) for name in ("before", "after"))
    pairs = draw_pair(before, after, (64, 64), torch.Generator().manual_seed(0))
    for edit, (first, second) in zip(edits, pairs, strict=True):
        differs = (first != second).any(0)
        assert differs.any()
        others = [piece for slot, piece in enumerate(edit.before.slots) if piece and slot != edit.slot]
        for piece in others:
            row, column = (round(64 * sum(side) / 2) for side in (piece.y, piece.x))
            assert not differs[row - 4 : row + 4, column - 4 : column + 4].any()


def test_boards_hold_what_was_asked_for() -> None:
    rng = random.Random(3)
    for count in (1, 2, 3):
        boards = [random_board(rng, count) for _ in range(50)]
        assert {len(board.pieces) for board in boards} == {count}
        assert all(board.is_clear() for board in boards)
