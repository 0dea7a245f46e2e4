"""Templates of whole phrases. Those of training and those held out for evaluation share words and no template.

`{item}` is the only item, `{first}` and `{second}` are two, `{at}` where one is and `{side}` the name of that place; a
1 or 2 says whose. `{relation}` is of the first to the second, `{inverse}` of the second to the first. `{body}` is what
a body says, `{on}` and `{ground}` the background, after what lies on it and by itself; `{colour}` is its colour alone.
"""

from dataclasses import dataclass

_DRAW = "(draw|paint|show|make|create|give me|show me|I want|I need|I would like|please draw|can you draw|let me see)"
_PICTURE = "(a picture of|a drawing of|an image of|a picture with|an image with|a picture that shows)"
_THERE = "(there is|there's|we see|you see|it shows|here is)"
_BE = "(is|sits|lies|stands)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Templates:
    """What can be said of one item, two, two by relation, two by their places, a moving one, and of backgrounds."""

    one: tuple[str, ...]
    pair: tuple[str, ...]
    relation: tuple[str, ...]
    places: tuple[str, ...]
    motion: tuple[str, ...]
    whole: tuple[str, ...]
    on: tuple[str, ...]
    ground: tuple[str, ...]


TRAINING = Templates(
    one=(
        *("{item}[ {at}]",) * 5,
        *("{item}[, {at}]",) * 2,
        "{at}(,|) {item}",
        f"{_DRAW} {{item}}[ {{at}}]",
        f"{_DRAW} {{item}}[ {{at}}]",
        f"{_PICTURE} {{item}}[ {{at}}]",
        f"{_THERE} {{item}}[ {{at}}]",
        f"{{at}} {_THERE} {{item}}",
        f"{{at}} {_BE} {{item}}",
        f"{{item}} {_BE} {{at}}",
        f"{_THERE} {{item}}. It {_BE} {{at}}",
        "{item}, (placed|put) {at}",
        "{item} that (sits|lies|is) {at}",
        "{side}: {item}",
        "{item}, {side}",
        "{item} - {side}",
        f"{_DRAW} {{item}} (and|then) (put|place) it {{at}}",
        "just {item}[ {at}]",
        "only {item}[ {at}]",
        "(one|a single) thing: {item}[ {at}]",
        "this is {item}[ {at}]",
        "what you see is {item}[ {at}]",
        "let it be {item}[ {at}]",
        "first {item}[ {at}]",
        f"{_DRAW} {{item}} so that it {_BE} {{at}}",
        f"{{item}} as it {_BE} {{at}}",
    ),
    pair=(
        *("{first} and {second}",) * 4,
        "{first} (with|plus) {second}",
        f"{_DRAW} {{first}} and {{second}}",
        f"{_THERE} {{first}} and {{second}}",
        "two (shapes|things): {first} and {second}",
    ),
    relation=(
        *("{first} {relation} {second}",) * 3,
        *("{second} {inverse} {first}",) * 3,
        f"{{first}} {_BE} {{relation}} {{second}}",
        f"{{second}} {_BE} {{inverse}} {{first}}",
        f"{_DRAW} {{first}} {{relation}} {{second}}",
        f"{_DRAW} {{second}} {{inverse}} {{first}}",
        f"{_PICTURE} {{first}} {{relation}} {{second}}",
        f"{_THERE} {{second}} {{inverse}} {{first}}",
        "{relation} {second} (is|there is|we see) {first}",
        "{inverse} {first} (is|there is|you see) {second}",
        "{first} and {inverse} it {second}",
        "{second} and {relation} it {first}",
        "{first}, (placed|put) {relation} {second}",
    ),
    places=(
        *("{first} {at1}(,| and|, and) {second} {at2}",) * 3,
        "{at1} {first} and {at2} {second}",
        "{at1} is {first}, {at2} is {second}",
        "{first} {at1} plus {second} {at2}",
        "{first} {at1}; {second} {at2}",
        "{side1}: {first}; {side2}: {second}",
        "{side1}: {first}, {side2}: {second}",
        f"{_DRAW} {{first}} {{at1}} and {{second}} {{at2}}",
        f"{_PICTURE} {{first}} {{at1}} and {{second}} {{at2}}",
        f"{_THERE} {{first}} {{at1}} and {{second}} {{at2}}",
        f"{{first}} {_BE} {{at1}} and {{second}} {_BE} {{at2}}",
        "two (shapes|things): {first} {at1} and {second} {at2}",
        f"{_THERE} {{first}} {{at1}}. {{second}} {_BE} {{at2}}",
    ),
    motion=(
        *("{item} {moves}",) * 3,
        *("{item} {moving}",) * 3,
        "{item} (that|which) {moves}",
        "{item} that is {moving}",
        "{item} is {moving}",
        "(a video of|a clip of|a film of|an animation of) {item} {moving}",
        "(a video|a clip|a film) in which {item} {moves}",
        "(a video|a clip) that shows {item} {moving}",
        "(show|show me|draw|paint|animate|create|give me|I want|I need|let me see) {item} {moving}",
        "(make|let|watch|see) {item} {move}",
        "there is {item}. It {moves}",
        "there is {item} and it {moves}",
        "{item}, {moving}",
        "{item}: it {moves}",
        "(now|here) {item} {moves}",
        "{item} should {move}",
        "{item} starts to {move}",
        "(please |)show {item} so that it {moves}",
        "{item} as it {moves}",
        "(first|then) {item} {moves}",
        "this is {item} (which|that) {moves}",
        "what you see is {item} {moving}",
        "can you draw {item} {moving}",
    ),
    whole=(
        *("{body} {on}",) * 5,
        *("{body}, {on}",) * 2,
        *("{body}, {ground}",) * 3,
        "{on}(,|) {body}",
        "{on}: {body}",
        "{ground}, {body}",
        "{ground}: {body}",
        "{ground}; {body}",
        "{ground}. {body}",
        "{body}. {ground}",
        "{body}; {ground}",
        "{body} - {ground}",
        "{body} and {ground}",
        "{body}, and {ground}",
    ),
    on=(
        *("on {colour}",) * 2,
        *("on ~ {colour} background",) * 3,
        "(on|against|upon) ~ (|plain |solid ){colour} (background|backdrop|canvas|ground|surface)",
        "(on|against|upon) {colour} (background|canvas|ground)",
        "against {colour}",
        "with ~ (|plain |solid ){colour} (background|backdrop)",
        "in front of ~ {colour} (background|backdrop|wall)",
        "on something (|plain |that is ){colour}",
        "with {colour} in the background",
        "with {colour} behind it",
    ),
    ground=(
        *("{colour} background",) * 3,
        "{colour} (backdrop|canvas)",
        "~ {colour} background",
        "the (background|backdrop|canvas) (is|should be|must be) (|all |plain ){colour}",
        "background {colour}",
        "background: {colour}",
        "(background|backdrop) in {colour}",
        "the background colour is {colour}",
        "(the rest|everything else) (is|should be) {colour}",
        "(everything|all) around it is {colour}",
        "{colour} all around",
        "it has ~ {colour} background",
        "(use|make it) ~ {colour} background",
        "a background of {colour}",
        "{colour} for the background",
        "set the background to {colour}",
        "make the background {colour}",
    ),
)
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
