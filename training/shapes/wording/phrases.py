"""Captions in free wording: any of the templates, synonyms, orders, articles, capitals and stops."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.shapes.captions import CaptionParts
from training.shapes.scenes import Item, MotionScene, Scene
from training.shapes.wording.fresh import (
    FRESH,
    FRESH_CORNERS_AT,
    FRESH_PLACES_AT,
    FRESH_THINGS,
    FRESH_TOWARDS,
)
from training.shapes.wording.grammar import filled, phrase
from training.shapes.wording.motions import FORMS, OWN_TOWARDS, OWN_VERBS, TOWARDS, VERBS
from training.shapes.wording.shown import TRAINING
from training.shapes.wording.templates import Templates
from training.shapes.wording.unseen import (
    HELD_OUT,
    HELD_OUT_CORNERS_AT,
    HELD_OUT_PLACES_AT,
    HELD_OUT_THINGS,
    HELD_OUT_TOWARDS,
)
from training.shapes.wording.words import (
    COLOUR_WORDS,
    CORNER_SIDES,
    CORNERS_AT,
    MORE_CORNERS_AT,
    MORE_PLACES_AT,
    PLACES_AT,
    RELATION_WORDS,
    ROW_WORDS,
    SHAPE_WORDS,
    SIDES,
    SIZE_WORDS,
    THINGS,
)

Say = Callable[[], str]
BARE_SHARE, POLITE_SHARE = 0.08, 0.05
OPENING_SHARE = 0.12
OWN_SHARE = 0.2  # share of verbs that include the direction
CASES = (0.6, 0.3, 0.05, 0.05)  # shares of phrases as they are, capitalised, in capitals, and with capitalised words
ENDINGS = ("",) * 12 + (".",) * 6 + ("!", " .", "...")
_BARE = re.compile(r"\b(the|a|an) ")
_SPARE_COMMA = re.compile(r",(?=\s*([.,;:!-]|$))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """The templates of phrases, and of their parts, that are chosen from."""

    templates: Templates
    things: tuple[str, ...]
    places_at: Mapping[str, tuple[str, ...]]
    corners_at: tuple[str, ...]
    towards: Mapping[str, tuple[str, ...]]
    own_towards: Mapping[str, tuple[str, ...]]


def _besides(some: Mapping[str, tuple[str, ...]], more: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: more[name] + templates for name, templates in some.items()}


SHOWN = Wording(
    templates=TRAINING,
    things=THINGS,
    places_at=_besides(PLACES_AT, MORE_PLACES_AT),
    corners_at=CORNERS_AT + MORE_CORNERS_AT,
    towards=TOWARDS,
    own_towards=OWN_TOWARDS,
)
NEW = Wording(
    templates=HELD_OUT,
    things=HELD_OUT_THINGS,
    places_at=_besides(PLACES_AT, HELD_OUT_PLACES_AT),
    corners_at=HELD_OUT_CORNERS_AT + CORNERS_AT,
    towards=HELD_OUT_TOWARDS,
    own_towards={},
)
NEWER = Wording(
    templates=FRESH,
    things=FRESH_THINGS,
    places_at=_besides(PLACES_AT, FRESH_PLACES_AT),
    corners_at=FRESH_CORNERS_AT + CORNERS_AT,
    towards=FRESH_TOWARDS,
    own_towards={},
)


def _colour(name: str, rng: random.Random) -> str:
    return filled(COLOUR_WORDS.get(name, name), {}, rng)


def _thing(item: Item, parts: CaptionParts, wording: Wording, rng: random.Random) -> str:
    fields: dict[str, Say] = {
        "colour": lambda: _colour(item.colour, rng),
        "shape": lambda: filled(SHAPE_WORDS[item.shape], {}, rng),
    }
    if parts.size:
        fields["size"] = lambda: filled(SIZE_WORDS[item.size], {}, rng)
    return phrase(wording.things, fields, rng)


def _corner(place: str, rng: random.Random) -> dict[str, Say]:
    row, column = place.split()
    return {"row": lambda: filled(ROW_WORDS[row], {}, rng), "end": lambda: row, "column": lambda: column}


def _at(place: str, wording: Wording, rng: random.Random) -> str:
    if place in wording.places_at:
        return filled(rng.choice(wording.places_at[place]), {}, rng)
    return filled(rng.choice(wording.corners_at), _corner(place, rng), rng)


def _side(place: str, rng: random.Random) -> str:
    return filled(SIDES[place], {}, rng) if place in SIDES else filled(CORNER_SIDES, _corner(place, rng), rng)


def _placed(place: str, wording: Wording, rng: random.Random) -> dict[str, Say]:
    return {"at": lambda: _at(place, wording, rng), "side": lambda: _side(place, rng)}


def _one(scene: Scene, parts: CaptionParts, wording: Wording, rng: random.Random) -> str:
    item = scene.items[0]
    fields: dict[str, Say] = {"item": lambda: _thing(item, parts, wording, rng)}
    if parts.place and item.place:
        fields |= _placed(item.place, wording, rng)
    return phrase(wording.templates.one, fields, rng)


def _part(item: Item, parts: CaptionParts, wording: Wording, rng: random.Random) -> str:
    fields: dict[str, Say] = {"item": lambda: _thing(item, parts, wording, rng)}
    return phrase(wording.templates.part, fields | _placed(item.place or "centre", wording, rng), rng)


def _two(scene: Scene, parts: CaptionParts, wording: Wording, rng: random.Random) -> str:
    """Return words for two items in the order of their relation, or else in any order."""
    items = scene.items if scene.relation and parts.place else tuple(rng.sample(scene.items, 2))
    names = ("first", "second")
    fields: dict[str, Say] = {
        name: lambda item=item: _thing(item, parts, wording, rng)  # type: ignore[misc]
        for name, item in zip(names, items, strict=True)
    }
    if not parts.place:
        return phrase(wording.templates.pair, fields, rng)
    if scene.relation:
        forward, backward = RELATION_WORDS[scene.relation]
        fields |= {"relation": lambda: filled(forward, {}, rng), "inverse": lambda: filled(backward, {}, rng)}
        return phrase(wording.templates.relation, fields, rng)
    for number, item in enumerate(items, start=1):
        placed = _placed(item.place or "centre", wording, rng)
        fields |= {f"{name}{number}": say for name, say in placed.items()}
        fields[f"part{number}"] = lambda item=item: _part(item, parts, wording, rng)  # type: ignore[misc]
    return phrase(wording.templates.places, fields, rng)


def _verb(motion: str, wording: Wording, rng: random.Random) -> tuple[tuple[str, str, str], str]:
    """Return the forms of a verb, and where it leads."""
    own = OWN_VERBS.get(motion)
    if own and rng.random() < OWN_SHARE:
        forms = rng.choice(own)
        return forms, filled(rng.choice(wording.own_towards[motion]), {}, rng) if wording.own_towards else ""
    forms = rng.choice(VERBS[motion])
    return forms, "" if own is None else filled(rng.choice(wording.towards[motion]), {}, rng)


def _motion(scene: MotionScene, parts: CaptionParts, wording: Wording, rng: random.Random) -> str:
    forms, towards = _verb(scene.motion, wording, rng)
    towards = towards and " " + towards
    fields: dict[str, Say] = {"item": lambda: _thing(scene.item, parts, wording, rng)}
    fields |= {name: lambda form=form: form + towards for name, form in zip(FORMS, forms, strict=True)}  # type: ignore[misc]
    return phrase(wording.templates.motion, fields, rng)


def _whole(body: str, background: str, wording: Wording, rng: random.Random) -> str:
    colour: dict[str, Say] = {"colour": lambda: _colour(background, rng)}
    fields: dict[str, Say] = {
        "body": lambda: body,
        "on": lambda: phrase(wording.templates.on, colour, rng),
        "ground": lambda: phrase(wording.templates.ground, colour, rng),
    }
    return phrase(wording.templates.whole, fields, rng)


def _finished(text: str, wording: Wording, rng: random.Random) -> str:
    if wording.templates.opening and rng.random() < OPENING_SHARE:
        text = f"{phrase(wording.templates.opening, {}, rng)} {text}"
    if rng.random() < POLITE_SHARE and "please" not in text:
        text += rng.choice((" please", ", please"))
    text = _SPARE_COMMA.sub("", text)
    if rng.random() < BARE_SHARE:
        text = _BARE.sub("", text)
    case = rng.choices((str, lambda text: text[0].upper() + text[1:], str.upper, str.title), CASES)[0]
    return case(text) + rng.choice(ENDINGS)


def free_caption(scene: Scene, rng: random.Random, parts: CaptionParts | None = None, wording: Wording = SHOWN) -> str:
    """Return a caption of a still picture that names these parts, or parts that are chosen at random."""
    parts = parts or CaptionParts.random(rng)
    body = (_one if len(scene.items) == 1 else _two)(scene, parts, wording, rng)
    return _finished(_whole(body, scene.background, wording, rng) if parts.background else body, wording, rng)


def free_motion_caption(
    scene: MotionScene, rng: random.Random, parts: CaptionParts | None = None, wording: Wording = SHOWN
) -> str:
    """Return a caption of a video that names the motion and these parts, or parts that are chosen at random."""
    parts = parts or CaptionParts.random(rng)
    body = _motion(scene, parts, wording, rng)
    return _finished(_whole(body, scene.background, wording, rng) if parts.background else body, wording, rng)
