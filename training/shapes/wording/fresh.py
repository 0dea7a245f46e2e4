"""A second set of templates that training never shows, apart from the first one in `unseen` too.

It was written before the structures of `shown` were widened, and these were widened after a look at which of the first
set's had failed. Which of the templates here fail was not looked at. The overall share of them that a text encoder
reads right was, once, before openings and more verbs and backgrounds were given to training.
"""

from training.shapes.wording.templates import Templates

FRESH_THINGS = (
    *("@ [{size} ]{colour} {shape}",) * 4,
    "@ {colour} coloured {shape}[ which is {size}]",
    "@ {shape} that is {colour}[, {size},]",
    "@ [{size} ]{shape}, all {colour},",
)
FRESH_PLACES_AT = {
    "centre": ("over at the centre", "near the very middle", "just in the middle", "placed at the exact center"),
    "left": ("at the very left", "over near the left edge", "far over on the left"),
    "right": ("at the very right", "over near the right edge", "far over on the right"),
    "top": ("over at the top edge", "by the very top", "far up at the top"),
    "bottom": ("over at the bottom edge", "by the very bottom", "far down at the bottom"),
}
FRESH_CORNERS_AT = (
    "in the {column} corner at the {end}",
    "by the {row} {column} corner",
    "over in the {row} {column}",
    "on the {column} side, near the {end}",
)


def _sideways(start: str, end: str) -> tuple[str, ...]:
    return (
        f"from the {start} end towards the {end} end",
        f"from {start} side over to {end} side",
        f"starting from the {start}, ending at the {end}",
        f"across to the {end}",
        f"{end}, away from the {start} edge",
    )


def _upright(start: str, end: str, towards: str) -> tuple[str, ...]:
    return (
        f"from the {start} end towards the {end} end",
        f"{towards} and away from the {start} edge",
        f"starting from the {start}, ending at the {end}",
        f"{towards} across the picture",
        f"over to the {end} side, {towards}",
    )


FRESH_TOWARDS = {
    "left": _sideways("right", "left"),
    "right": _sideways("left", "right"),
    "up": _upright("bottom", "top", "up"),
    "down": _upright("top", "bottom", "down"),
}
FRESH = Templates(
    one=(
        "please create {item}[ and place it {at}]",
        "all I need is {item}[, it should be {at}]",
        "you should see {item}[ {at}]",
        "{at} I would like to see {item}",
        "show a picture in which {item} is {at}",
        "I want to see {item}[ and I want it {at}]",
        "the picture: {item}[, {at}]",
        "{at} let me see {item}",
        "make it so that {item} is {at}",
    ),
    pair=(
        "all I need is {first} and also {second}",
        "you should see both {first} and {second}",
        "I want to see {first}, I want to see {second}",
    ),
    relation=(
        "please create {first} {relation} {second}",
        "all I need is {second} and, {relation} it, {first}",
        "you should see {first} {relation} {second}",
        "I want {first}. I want it {relation} {second}",
        "make it so that {second} is {inverse} {first}",
        "{first} goes {relation} {second}",
        "in the image {first}, {relation} {second}",
        "there is {second} here, {inverse} {first}",
    ),
    places=(
        "please create {first} {at1} and also {second} {at2}",
        "all I need is {first} {at1}, {second} {at2}",
        "you should see {first} {at1} and {at2} you should see {second}",
        "{at1} goes {first} and {at2} goes {second}",
        "{first} goes {at1}; {second} goes {at2}",
        "make it so that {first} is {at1} and that {second} is {at2}",
        "{side1} for {first} and {side2} for {second}",
    ),
    motion=(
        "all I need is {item} that is {moving}",
        "you should see {item} {moving}",
        "please let {item} {move}",
        "I want to see how {item} {moves}",
        "a film of {item} which {moves}",
        "make it so that {item} {moves}",
        "{item}, and it {moves}",
        "{item} can {move}, show it",
        "here it is: {item} that {moves}",
    ),
    whole=(
        "{ground}, and {body}",
        "{body}, with it all {on}",
        "{on} you have this: {body}",
        "{body}; all {on}",
        "{ground}; on it, {body}",
        "please, {body}; {ground}",
        "{on} now: {body}",
    ),
    on=(
        "on a canvas that is {colour}",
        "upon something {colour}",
        "in front of ~ solid {colour} canvas",
        "on ground that is {colour}",
        "with ~ {colour} wall behind it",
    ),
    ground=(
        "let the background be {colour}",
        "I want the background {colour}",
        "everything around it must be {colour}",
        "the ground is {colour}",
        "the background: all {colour}",
        "behind it is ~ {colour} canvas",
    ),
)
