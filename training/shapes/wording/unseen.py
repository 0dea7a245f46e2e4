"""Templates that training never shows, and the parts that they are filled with. They stay as they are, so that figures
compare with earlier ones."""

from training.shapes.wording.templates import Templates
from training.shapes.wording.words import MIDDLE

HELD_OUT_THINGS = (
    *("@ [{size} ]{colour} {shape}",) * 4,
    "@ {colour} {shape}[, {size},]",
    "@ {shape} coloured {colour}[ which is {size}]",
    "@ {shape}[ that is {size}], in {colour},",
    "@ {shape}[, {size},] which is {colour}",
)
HELD_OUT_PLACES_AT = {
    "centre": (f"near the exact {MIDDLE}", f"put at the very {MIDDLE}", f"over in the {MIDDLE}"),
    "left": ("by the left edge", "near the left side", "over on the far left"),
    "right": ("by the right edge", "near the right side", "over on the far right"),
    "top": ("up by the upper edge", "on the upper side", "up at the very top"),
    "bottom": ("down by the lower edge", "on the lower side", "down at the very bottom"),
}
HELD_OUT_CORNERS_AT = (
    "near the {row} {column} corner",
    "at the {row}-{column}",
    "on the {column}, at the {end}",
    "{row} edge, {column} side",
)
HELD_OUT_TOWARDS = {
    "left": ("over to the left", "from the right side to the left side", "towards the left side"),
    "right": ("over to the right", "from the left side to the right side", "towards the right side"),
    "up": ("up to the top", "up from the bottom", "upwards to the top"),
    "down": ("down to the bottom", "down from the top", "downwards to the bottom"),
}
HELD_OUT = Templates(
    one=(
        "here you see {item}[, and it is {at}]",
        "what I want is {item}[, placed {at}]",
        "it shows {item}[; it stands {at}]",
        "put {item} {at}",
        "can you show me {item}[ that stands {at}]",
        "only one thing is here: {item}[, {at}]",
        "{at} please draw {item}",
        "in the picture {item} (lies|is) {at}",
        "let there be {item}[ {at}]",
        "{item}, and (please |)put it {at}",
    ),
    pair=(
        "here you see {first} and you see {second}",
        "what I want is {first}, and then {second}",
        "let there be {first} and let there be {second}",
    ),
    relation=(
        "put {first} {relation} {second}",
        "what I want is {second} {inverse} {first}",
        "here is {first}, and {inverse} it is {second}",
        "{first} that lies {relation} {second}",
        "you see {second}, and {relation} it you see {first}",
        "let there be {second} {inverse} {first}",
        "two things: {first} is {relation} {second}",
        "{relation} {second}, please, {first}",
    ),
    places=(
        "put {first} {at1} and put {second} {at2}",
        "{first}, which is {at1}, and {second}, which is {at2}",
        "here you see {first} {at1}; {at2} you see {second}",
        "{at1} I want {first}; I want {second} {at2}",
        "what I need: {first}, {side1}, and {second}, {side2}",
        "let there be {first} {at1}, then {second} {at2}",
        "in the picture {first} is {at1} and {at2} there is {second}",
    ),
    motion=(
        "here you see {item} {moving}",
        "what I want is {item} that {moves}",
        "in the film there is {item} which {moves}",
        "let me watch {item}: it should {move}",
        "see {item}, it is {moving}",
        "please animate {item} so that it {moves}",
        "can you make {item} {move}",
        "now it {moves}: {item}",
        "a video that shows {item} as it {moves}",
    ),
    whole=(
        "{on} please: {body}",
        "{body} - and {ground}",
        "{body}, and all {on}",
        "{on} I want this: {body}",
        "first {ground}, then {body}",
        "{ground} and then {body}",
        "{body}. It is all {on}",
        "{body}; please, {ground}",
        "{body}; it is {on}",
    ),
    on=(
        "on a surface of {colour}",
        "on a background that is {colour}",
        "against something {colour}",
        "against a wall in {colour}",
        "in front of something {colour}",
        "with everything behind it {colour}",
    ),
    ground=(
        "use {colour} for the background",
        "paint the background {colour}",
        "{colour} should be the background",
        "the background must be set to {colour}",
        "everything behind it is {colour}",
        "make everything else {colour}",
        "a canvas of {colour}",
    ),
)
