"""Words for edits: many phrasings, in any of which articles, politeness and capitals may be there or not."""

import random
import re
from dataclasses import dataclass

from training.shapes.captions import SIZE_WORDS, colour_word, place_phrase, with_article
from training.shapes.edits import KINDS, Edit
from training.shapes.phrasings import PHRASINGS, Phrasings
from training.shapes.reading import Labels
from training.shapes.references import Description, described, reference, reference_phrase
from training.shapes.scenes import BACKGROUNDS, PLACES, SHAPES, SIZES

_TO_PHRASES = {
    "left": ("to the left", "left", "to the left side", "over to the left"),
    "right": ("to the right", "right", "to the right side", "over to the right"),
    "top": ("to the top", "up", "upwards", "up to the top"),
    "bottom": ("to the bottom", "down", "downwards", "down to the bottom"),
    "centre": ("to the centre", "to the center", "to the middle", "into the middle"),
}
_TO_CORNERS = ("to the {0}", "to the {1}", "to the {0} corner", "to the {1} corner", "into the {0} corner")
_GROUNDS = ("the background", "the background", "the background", "the backdrop", "the background colour")
_BEGINNINGS = ("please", "please", "can you", "could you", "now", "I want you to", "could you please", "just", "then")
_ENDINGS = (" please", ", please", " now")
_STATEMENTS = ("{", "I ", "there ", "no ", "without ", "with ", "on ", "instead ")
_ARTICLE = re.compile(r"\b(the|a|an) ")
ARTICLES_SHARE, POLITE_SHARE, CAPITAL_SHARE, STOP_SHARE = 0.88, 0.25, 0.3, 0.25
EDIT_ANSWERS = (
    len(KINDS),
    *(len(SHAPES) + 1, len(BACKGROUNDS) + 1, len(SIZES) + 1, len(PLACES) + 1) * 2,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """An edit in words. `named` has the properties in words of the piece before the edit, `made` those after it."""

    text: str
    kind: str
    named: Description
    made: Description


def _phrasing_key(edit: Edit) -> str:
    if edit.kind != "resize":
        return edit.kind
    assert edit.new is not None
    return {"large": "bigger", "small": "smaller"}[edit.new.size]


def _made(edit: Edit, rng: random.Random) -> Description:
    """Return the properties of the result that the words must have, and some that they may have."""
    if edit.slot is None:
        return Description(colour=edit.after.background)
    old, new = edit.old, edit.new
    if edit.kind == "move":
        return Description(place=edit.place)
    if new is None:
        return Description()
    if edit.kind == "add":
        size = new.size if new.size in SIZE_WORDS and rng.random() < 0.7 else None
        return Description(
            shape=new.shape, colour=new.colour, size=size, place=new.place if rng.random() < 0.93 else None
        )
    if edit.kind == "resize":
        return Description(size=new.size)
    assert old is not None
    if edit.kind == "recolour":
        return Description(colour=new.colour)
    return Description(shape=new.shape, colour=new.colour if new.colour != old.colour or rng.random() < 0.15 else None)


def to_phrase(place: str, rng: random.Random) -> str:
    """Return a phrase for where something moves to, one of `PLACES`."""
    upper = place.replace("top", "upper").replace("bottom", "lower")
    return rng.choice(_TO_PHRASES.get(place, _TO_CORNERS)).format(place, upper)


def _at(edit: Edit, made: Description, rng: random.Random) -> str:
    """Return a phrase for the place; a phrasing of "add" has it in the middle, so with a space before it."""
    if made.place is None:
        return ""
    return f"{' ' if edit.kind == 'add' else ''}{place_phrase(made.place, rng)}"


def _new_thing(made: Description, rng: random.Random) -> str:
    return with_article(described(made, rng), rng) if made.shape else ""


def _filled(phrasing: str, edit: Edit, named: Description, made: Description, rng: random.Random) -> str:
    if edit.kind == "add" and made.place and phrasing.startswith(("add", "draw", "put")) and rng.random() < 0.15:
        phrasing = f"{place_phrase(made.place, rng)} {phrasing.replace('{at}', '')}"
    several = len(edit.before.pieces) > 1
    return phrasing.format(
        it=reference_phrase(named, rng, compared=several),
        a=_new_thing(made, rng),
        at=_at(edit, made, rng),
        to=to_phrase(made.place, rng) if made.place else "",
        colour=colour_word(made.colour, rng) if made.colour else "",
        size=rng.choice(SIZE_WORDS[made.size]) if made.size else "",
        ground=rng.choice(_GROUNDS),
    )


def _finished(text: str, phrasing: str, rng: random.Random) -> str:
    is_order = not phrasing.startswith(_STATEMENTS)
    asks = False
    if rng.random() < POLITE_SHARE:
        beginning = rng.choice(_BEGINNINGS) if is_order and rng.random() < 0.7 else ""
        asks = "you" in beginning and "want" not in beginning
        text = f"{beginning} {text}".strip() if beginning else text + rng.choice(_ENDINGS)
    if rng.random() > ARTICLES_SHARE:
        text = _ARTICLE.sub("", text)
    if rng.random() < CAPITAL_SHARE:
        text = text[0].upper() + text[1:]
    return text + (rng.choice("?.") if asks else ".") if rng.random() < STOP_SHARE else text


def instruction(edit: Edit, rng: random.Random, phrasings: Phrasings = PHRASINGS) -> Instruction:
    """Return words that ask for the edit and for no other, in one of the phrasings."""
    old = edit.old
    named = Description() if old is None else reference(edit.before, old, rng)
    made = _made(edit, rng)
    phrasing = rng.choice(phrasings[_phrasing_key(edit)])
    text = _filled(phrasing, edit, named, made, rng)
    return Instruction(text=_finished(text, phrasing, rng), kind=edit.kind, named=named, made=made)


def _indices(description: Description) -> tuple[int, ...]:
    """Return the index of each property in words, 0 if it is left open."""
    choices = (
        (description.shape, SHAPES),
        (description.colour, BACKGROUNDS),
        (description.size, SIZES),
        (description.place, tuple(PLACES)),
    )
    return tuple(0 if value is None else names.index(value) + 1 for value, names in choices)


def edit_labels(instruction: Instruction) -> Labels:
    """Return what a reader should read: the kind, what is named and what is made of it, in one row."""
    return [(KINDS.index(instruction.kind), *_indices(instruction.named), *_indices(instruction.made))]
