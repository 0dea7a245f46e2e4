"""Captions of scenes, in several phrasings; sizes, places, relations and backgrounds are sometimes left out."""

import random
from dataclasses import dataclass

from training.shapes.scenes import Item, MotionScene, Scene

SIZE_WORDS = {"small": ("small", "small", "little", "tiny"), "large": ("large", "large", "big", "huge")}
_COLOUR_WORDS = {"purple": ("purple", "purple", "purple", "violet"), "grey": ("grey", "gray")}
_PLACE_PHRASES = {
    "centre": ("in the centre", "in the center", "in the middle", "at the centre"),
    "left": ("on the left", "at the left", "on the left side", "to the left"),
    "right": ("on the right", "at the right", "on the right side", "to the right"),
    "top": ("at the top", "on the top", "near the top"),
    "bottom": ("at the bottom", "on the bottom", "near the bottom"),
}
_CORNER_PHRASES = ("at the {0}", "in the {0}", "in the {0} corner", "{0} corner", "in the {1} corner")
_RELATION_PHRASES = {
    "above": (("above", "over", "on top of"), ("below", "under", "beneath")),
    "left of": (("to the left of", "left of"), ("to the right of", "right of")),
}
_MOTION_PHRASES = {
    "left": ("{moves} from right to left", "{moves} to the left", "{moves} left"),
    "right": ("{moves} from left to right", "{moves} to the right", "{moves} right"),
    "up": ("{moves} from bottom to top", "{moves} up", "{moves} upwards"),
    "down": ("{moves} from top to bottom", "{moves} down", "{moves} downwards"),
    "grow": ("grows", "growing", "gets bigger", "that grows", "becomes larger", "is growing"),
    "shrink": ("shrinks", "shrinking", "gets smaller", "that shrinks", "becomes smaller", "is shrinking"),
    "turn": ("turns", "turning", "rotates", "spins", "that turns", "is rotating", "spinning"),
}
FULL_CAPTION_SHARE = 0.6
_MOVES = ("moves", "moves", "moving", "that moves", "slides", "is moving", "goes")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionParts:
    """The parts of a scene that its caption names."""

    size: bool = True
    place: bool = True
    background: bool = True

    @classmethod
    def random(cls, rng: random.Random) -> "CaptionParts":
        """Return all parts for most captions, and some of them for the others."""
        if rng.random() < FULL_CAPTION_SHARE:
            return cls()
        return cls(size=rng.random() < 0.6, place=rng.random() < 0.8, background=rng.random() < 0.75)


def colour_word(name: str, rng: random.Random) -> str:
    """Return a word for one of `BACKGROUNDS`."""
    return rng.choice(_COLOUR_WORDS.get(name, (name,)))


def with_article(words: str, rng: random.Random) -> str:
    """Return the words after "a" or "an", now and then after "one"."""
    article = "an" if words[0] in "aeiou" else "a"
    return f"{'one' if rng.random() < 0.05 else article} {words}"


def _item_phrase(item: Item, parts: CaptionParts, rng: random.Random) -> str:
    size = [rng.choice(SIZE_WORDS[item.size])] if parts.size and item.size in SIZE_WORDS else []
    return with_article(" ".join([*size, colour_word(item.colour, rng), item.shape]), rng)


def place_phrase(place: str, rng: random.Random) -> str:
    """Return a phrase for one of `PLACES`."""
    if place in _PLACE_PHRASES:
        return rng.choice(_PLACE_PHRASES[place])
    upper = place.replace("top", "upper").replace("bottom", "lower")
    return rng.choice(_CORNER_PHRASES).format(place, upper)


def _placed_phrase(item: Item, parts: CaptionParts, rng: random.Random) -> str:
    phrase = _item_phrase(item, parts, rng)
    if not parts.place or item.place is None:
        return phrase
    comma = "," if rng.random() < 0.15 else ""
    return f"{phrase}{comma} {place_phrase(item.place, rng)}"


def _relation_phrase(scene: Scene, parts: CaptionParts, rng: random.Random) -> str:
    assert scene.relation is not None
    first, second = (_item_phrase(item, parts, rng) for item in scene.items)
    forward, backward = _RELATION_PHRASES[scene.relation]
    if not parts.place:
        return " and ".join(rng.sample((first, second), 2))
    if rng.random() < 0.5:
        return f"{first} {rng.choice(forward)} {second}"
    return f"{second} {rng.choice(backward)} {first}"


def _items_phrase(scene: Scene, parts: CaptionParts, rng: random.Random) -> str:
    if scene.relation is not None:
        return _relation_phrase(scene, parts, rng)
    return " and ".join(_placed_phrase(item, parts, rng) for item in rng.sample(scene.items, len(scene.items)))


def _with_background(body: str, background: str, rng: random.Random) -> str:
    colour = colour_word(background, rng)
    ground = with_article(f"{colour} background", rng).replace("one ", "a ")
    patterns = ("{0} on {2}", "{0} on {2}", "{0}, {1} background", "{0} with {2}", "{0} against {2}", "on {2}, {0}")
    return rng.choice(patterns).format(body, colour, ground)


def finish(text: str, rng: random.Random) -> str:
    if rng.random() < 0.08 and not text.startswith("on "):
        text = f"{rng.choice(('a picture of', 'a drawing of', 'an image of'))} {text}"
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.25 else "")


def caption(scene: Scene, rng: random.Random, parts: CaptionParts | None = None) -> str:
    """Return a caption of a still picture that names these parts, or parts that are chosen at random."""
    parts = parts or CaptionParts.random(rng)
    body = _items_phrase(scene, parts, rng)
    return finish(_with_background(body, scene.background, rng) if parts.background else body, rng)


def motion_caption(scene: MotionScene, rng: random.Random, parts: CaptionParts | None = None) -> str:
    """Return a caption of a video that names the motion and these parts, or parts that are chosen at random."""
    parts = parts or CaptionParts.random(rng)
    motion = rng.choice(_MOTION_PHRASES[scene.motion]).format(moves=rng.choice(_MOVES))
    body = f"{_item_phrase(scene.item, parts, rng)} {motion}"
    return finish(_with_background(body, scene.background, rng) if parts.background else body, rng)
