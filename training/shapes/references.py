"""Words for one piece among others ("the small red circle on the left"), which fit this piece alone."""

import random
from dataclasses import dataclass
from itertools import compress, product

from training.shapes.boards import Board, Piece
from training.shapes.captions import SIZE_WORDS, colour_word, place_phrase
from training.shapes.scenes import PLACES, SHAPES

SHAPE_WORDS = {
    "circle": ("circle",) * 8 + ("disc", "disk", "ball", "dot"),
    "square": ("square",) * 8 + ("box", "block"),
    "triangle": ("triangle",),
    "star": ("star",),
}
_ANY_SHAPE = ("shape", "shape", "one", "one", "thing", "object", "figure")
_COMPARATIVES = {"small": ("smaller", "smallest"), "large": ("bigger", "larger", "biggest", "largest")}
_OPPOSITE_SIZE = {"small": "large", "large": "small"}
_PARTS = ("shape", "colour", "size", "place")
_LIKELY = {"shape": 4.0, "colour": 1.0, "size": 0.35, "place": 0.35}


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Properties of a shape or a background in words; None where they leave it open."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    place: str | None = None


def _lies_at(piece: Piece, place: str) -> bool:
    column, row = PLACES[place]
    if place == "centre":
        return piece.place == "centre"
    return column in (0, piece.column) and row in (0, piece.row)


def fits(piece: Piece, description: Description) -> bool:
    """Return whether the words may mean this piece. A size excludes none but the opposite one."""
    return (
        description.shape in (None, piece.shape)
        and description.colour in (None, piece.colour)
        and (description.size is None or piece.size != _OPPOSITE_SIZE[description.size])
        and (description.place is None or _lies_at(piece, description.place))
    )


def _place_names(piece: Piece) -> list[str]:
    """Return the names of a piece's place: a corner has its own and those of its two sides."""
    return [piece.place] if piece.place == "centre" else [name for name in PLACES if _names(piece, name)]


def _names(piece: Piece, place: str) -> bool:
    return place != "centre" and _lies_at(piece, place)


def reference(board: Board, piece: Piece, rng: random.Random) -> Description:
    """Return a combination of the piece's properties that no other piece of the board has."""
    whole = Description(
        shape=piece.shape,
        colour=piece.colour,
        size=piece.size if piece.size in _OPPOSITE_SIZE else None,
        place=rng.choice(_place_names(piece)),
    )
    choices, weights = [], []
    for chosen in product((True, False), repeat=len(_PARTS)):
        description = Description(**{part: getattr(whole, part) for part in compress(_PARTS, chosen)})
        if [fits(other, description) for other in board.pieces].count(True) == 1:
            choices.append(description)
            weights.append(_likelihood(description))
    return rng.choices(choices, weights)[0]


def _likelihood(description: Description) -> float:
    likelihood = 1.0
    for part in _PARTS:
        likelihood *= 1.0 if getattr(description, part) is None else _LIKELY[part]
    return likelihood


def shape_word(shape: str | None, rng: random.Random) -> str:
    """Return a noun for one of `SHAPES`, or for any shape."""
    assert shape is None or shape in SHAPES
    return rng.choice(SHAPE_WORDS[shape] if shape else _ANY_SHAPE)


def described(description: Description, rng: random.Random, *, compared: bool = False) -> str:
    """Return the words without an article, and without the place. `compared` if there are others to compare with."""
    sizes: tuple[str, ...] = SIZE_WORDS.get(description.size or "", ())
    if compared and description.size and rng.random() < 0.3:
        sizes = _COMPARATIVES[description.size]
    size = [rng.choice(sizes)] if sizes else []
    colour = [colour_word(description.colour, rng)] if description.colour else []
    return " ".join([*size, *colour, shape_word(description.shape, rng)])


def reference_phrase(description: Description, rng: random.Random, *, compared: bool) -> str:
    """Return the words of a reference, with its article."""
    if description == Description():
        return rng.choice(("it", "it", "the shape"))
    words = described(description, rng, compared=compared)
    if description.place is None:
        return f"the {words}"
    if description.place != "centre" and rng.random() < 0.3:
        return f"the {description.place} {words}"
    return f"the {words} {place_phrase(description.place, rng)}"
