"""The judge passes the drawings of edits, and fails those that did nothing, too much, or something else."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from training.judge import SeenShape, look_at
from training.kontext_shapes.evaluate import Task, held_out_tasks, judged
from training.kontext_shapes.judge import Judged, check_edit, is_done, is_kept
from training.shapes.boards import Piece
from training.shapes.edits import KINDS

COUNT = 64


@cache
def _tasks() -> list[Task]:
    return held_out_tasks(COUNT, seed=1, height=96, width=96)


@cache
def _right() -> list[Judged]:
    """Return the tasks, each with its wanted drawing as the result."""
    seen = [(look_at(task.before), look_at(task.wanted)) for task in _tasks()]
    return [
        Judged(edit=task.edit, said=task.said, before=before, wanted=wanted, result=wanted)
        for task, (before, wanted) in zip(_tasks(), seen, strict=True)
    ]


def test_every_kind_is_judged_and_half_of_the_phrasings_are_new() -> None:
    assert {task.edit.kind for task in _tasks()} == set(KINDS)
    assert sum(task.is_new_phrasing for task in _tasks()) == COUNT // 2
    checks = judged(_tasks()[1], _tasks()[1].wanted)
    assert checks["done (new phrasing)"]
    assert "done (known phrasing)" not in checks


def test_it_passes_what_was_asked_for() -> None:
    for right in _right():
        assert all(check_edit(right).values()), (right.edit.kind, right.said.text)


def test_a_picture_left_alone_keeps_all_and_does_nothing() -> None:
    for right in _right():
        alone = replace(right, result=right.before)
        assert not is_done(alone), (right.edit.kind, right.said.text)
        assert is_kept(alone), (right.edit.kind, right.said.text)


def test_another_edits_result_is_neither() -> None:
    others = [replace(one, result=other.wanted) for one, other in pairwise(_right())]
    assert sum(is_kept(other) for other in others) <= 2
    assert not any(is_kept(other) and is_done(other) for other in others)


def test_a_changed_background_is_not_kept() -> None:
    for right in _right():
        if right.edit.kind != "background":
            other = "red" if right.wanted.background != "red" else "blue"
            result = replace(right, result=replace(right.wanted, background=other))
            assert is_done(result)
            assert not is_kept(result)


def _split(right: Judged, piece: Piece) -> tuple[SeenShape, tuple[SeenShape, ...]]:
    """Return the shape seen for a piece, and all others."""
    shape = next(s for s in right.wanted.shapes if (s.shape, s.colour) == (piece.shape, piece.colour))
    return shape, tuple(s for s in right.wanted.shapes if s is not shape)


def _with_shapes(right: Judged, *shapes: SeenShape) -> Judged:
    return replace(right, result=replace(right.wanted, shapes=shapes))


@pytest.mark.parametrize("change", ["colour", "shape", "x", "radius", "gone", "another"])
def test_a_change_to_another_shape_is_not_kept(change: str) -> None:
    """One shape that the edit does not name is broken in what was seen of the right result."""
    rng, checked = random.Random(0), 0
    for right in _right():
        others = [piece for slot, piece in enumerate(right.edit.before.slots) if piece and slot != right.edit.slot]
        if not others:
            continue
        shape, rest = _split(right, rng.choice(others))
        broken = {
            "colour": (replace(shape, colour="grey"),),
            "shape": (replace(shape, shape="hexagon"),),
            "x": (replace(shape, x=shape.x + 0.1),),
            "radius": (replace(shape, radius=shape.radius * 1.3),),
            "gone": (),
            "another": (shape, replace(shape, shape="hexagon"), replace(shape, shape="ring")),
        }
        assert not is_kept(_with_shapes(right, *rest, *broken[change])), right.said.text
        checked += 1
    assert checked > 20


def test_a_wrong_colour_place_or_size_is_not_done() -> None:
    checked = set()
    for right in _right():
        new, kind = right.edit.new, right.edit.kind
        if new is None or (kind == "move" and right.edit.place == "centre"):
            continue
        shape, rest = _split(right, new)
        radii = {(seen.shape, seen.colour): seen.radius for seen in right.before.shapes}
        wrong = {
            "move": replace(shape, x=1 - shape.x, y=1 - shape.y),
            "resize": replace(shape, radius=radii.get((new.shape, new.colour), 0.0)),
        }.get(kind, replace(shape, colour="grey"))
        assert not is_done(_with_shapes(right, *rest, wrong)), right.said.text
        checked.add(kind)
    assert checked == {"move", "resize", "recolour", "reshape", "add"}


def test_a_piece_that_moves_keeps_its_size_and_the_side_that_was_not_named() -> None:
    checked = 0
    for right in _right():
        if right.edit.kind == "move" and right.edit.place in ("left", "right") and right.edit.new:
            shape, rest = _split(right, right.edit.new)
            checked += 1
            for wrong in (replace(shape, y=shape.y + 0.1), replace(shape, radius=1.3 * shape.radius)):
                assert is_done(_with_shapes(right, *rest, wrong))
                assert not is_kept(_with_shapes(right, *rest, wrong))
    assert checked


@pytest.mark.parametrize("kind", ["recolour", "resize"])
def test_a_piece_that_changes_stays_where_it_is(kind: str) -> None:
    for right in _right():
        if right.edit.kind == kind and right.edit.new:
            shape, rest = _split(right, right.edit.new)
            assert not is_kept(_with_shapes(right, *rest, replace(shape, x=shape.x + 0.3)))
