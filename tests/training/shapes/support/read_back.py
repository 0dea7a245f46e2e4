"""Read a caption back by rules of English, written without a look at the templates of captions."""

import re
from dataclasses import dataclass
from itertools import pairwise

SHAPES = {
    "circle": "circle disc disk dot ball round circular",
    "square": "square box block tile",
    "triangle": "triangle pyramid triangular sided",
    "star": "star pentagram",
}
SIZES = {"small": "small little tiny mini miniature", "medium": "medium mid", "large": "large big huge giant enormous"}
COLOURS = {name: name for name in ("red", "green", "blue", "yellow", "orange", "white", "black")} | {
    "purple": "purple violet",
    "grey": "grey gray",
}
COLUMNS = {"left": -1, "right": 1}
ROWS = {"top": -1, "upper": -1, "up": -1, "bottom": 1, "lower": 1, "down": 1}
MIDDLE = {"centre", "center", "middle", "centred", "centered"}
MOTIONS = {
    "grow": r"gr(ow|ows|owing)|bigger|larger|expand\w*|swell\w*|increas\w+",
    "shrink": r"shrink\w*|smaller|contract\w*|dwindl\w+|decreas\w+",
    "turn": r"turn\w*|rotat\w+|spin\w*|twirl\w*|revolv\w+",
    "left": r"left|leftwards",
    "right": r"right|rightwards",
    "up": r"up|upwards?|top|upper|ris\w+|climb\w*",
    "down": r"down|downwards?|bottom|lower|fall\w*|sink\w*|drop\w*",
}
_HUE = "(" + "|".join(word for names in COLOURS.values() for word in names.split()) + ")"
_GROUND = "(?:background|backdrop|canvas|ground|surface|wall|sheet|page|field)"
_LITTLE = "(?:(?:is|that|in|of|to|be|should|must|has|set|with|colour|all|plain|the|a|an|:) )*"
GROUNDS = (  # the surer ones first
    rf"{_HUE} (?:all around|everywhere|behind|(?:is|as|for|should be|in) (?:the )?background)",
    rf"{_HUE} {_GROUND}",
    rf"(?:rest|else|around it|behind it|surrounded by) {_LITTLE}{_HUE}",
    rf"{_GROUND} {_LITTLE}{_HUE}",
    rf"(?:on|against|upon|in front of) (?:(?:something|that|is|a|an|plain|solid) )*{_HUE}",
)
# where motions begin
BEGINNINGS = r"\b(?:from|out of|starting (?:at|on)) (?:the )?\w+(?: hand)?(?: (?:side|edge|border|end)\b)?"
_NOT_A_PICTURE = r"(?!(?:the )?(?:picture|image))"
RELATIONS = {
    ("above", False): rf"above|over (?!(?:to|in|on|at|by|near) )|on top of {_NOT_A_PICTURE}|higher than",
    ("above", True): r"below|under(?:neath)?|beneath|lower than",
    ("left of", False): rf"left (?:side )?of {_NOT_A_PICTURE}",
    ("left of", True): rf"right (?:side )?of {_NOT_A_PICTURE}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadItem:
    shape: str
    colour: str
    size: str | None
    column_and_row: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadScene:
    """The meaning of a caption; the first item of a relation first."""

    items: tuple[ReadItem, ...]
    background: str | None
    relation: str | None = None


def _plain(text: str) -> str:
    text = re.sub(r" - ", " ; ", text.lower()).replace("-", " ")
    return " ".join(re.findall(r"[a-z']+|[.,:;!]", text)) + " "


def _find(words: list[str], table: dict[str, str]) -> list[tuple[int, str]]:
    """Return where each word of the table is, and its meaning."""
    meaning = {word: name for name, names in table.items() for word in names.split()}
    return [(index, meaning[word]) for index, word in enumerate(words) if word in meaning]


def _without_background(text: str) -> tuple[str, str | None]:
    for pattern in GROUNDS:
        if match := re.search(rf"\b{pattern} ", text):
            colour = next(name for name, names in COLOURS.items() if match[1] in names.split())
            return f"{text[: match.start()]}; {text[match.end() :]}", colour
    return text, None


def _things(words: list[str]) -> list[tuple[int, int, str, str]]:
    """Return first and last word of each thing, its shape and colour: the shapes and colours in order."""
    shapes, colours = _find(words, SHAPES), _find(words, COLOURS)
    assert len(shapes) == len(colours), words
    return [(min(a, b), max(a, b), shape, colour) for (a, shape), (b, colour) in zip(shapes, colours, strict=True)]


def _sizes(words: list[str], things: list[tuple[int, int, str, str]]) -> list[str | None]:
    """Return the size of each thing: one between two things belongs to the first only if it follows at once."""
    sizes: list[str | None] = [None] * len(things)
    for index, size in _find(words, SIZES):
        owner = 0
        for number, (_, end, _, _) in enumerate(things[:-1]):
            between = " ".join(words[end + 1 : index])
            follows = re.fullmatch(r"(shape )?,?|(shape )?(that|which) is", between) is not None
            if index > end and not follows:
                owner = number + 1
        assert sizes[owner] is None, words
        sizes[owner] = size
    return sizes


def _places(words: list[str], count: int) -> list[tuple[int, int] | None]:
    """Return columns and rows, in order; a thing or a break between two words of place separates them."""
    breaks = {index for index, _ in [*_find(words, SHAPES), *_find(words, COLOURS)]}
    breaks |= {index for index, word in enumerate(words) if word in (";", ".", "and", "plus")}
    at = [index for index, word in enumerate(words) if word in COLUMNS or word in ROWS or word in MIDDLE]
    groups = [[at[0]]] if at else []
    for before, after in pairwise(at):
        if breaks & set(range(before, after)):
            groups.append([])
        groups[-1].append(after)
    read = []
    for group in groups:
        columns, rows = ({table[words[i]] for i in group if words[i] in table} for table in (COLUMNS, ROWS))
        assert len(columns) <= 1, words
        assert len(rows) <= 1, words
        read.append((next(iter(columns), 0), next(iter(rows), 0)))
    assert len(read) in (0, count), words
    return [*read] if read else [None] * count


def _relation(text: str, things: list[tuple[int, int, str, str]]) -> tuple[str | None, bool]:
    """Return the relation, and whether it is of the second thing to the first."""
    for (name, inverse), pattern in RELATIONS.items():
        if match := re.search(rf"\b(?:{pattern})", text):
            start = len(text[: match.start()].split())
            is_between = things[0][1] < start < things[1][0]
            refers_back = text[match.end() :].strip().startswith("it ")
            return name, inverse ^ (not is_between or refers_back)
    return None, False


def read_still(text: str) -> ReadScene:
    """Return the scene of a still picture's caption."""
    text, background = _without_background(_plain(text))
    words = text.split()
    things = _things(words)
    relation, is_inverse = _relation(text, things) if len(things) == 2 else (None, False)
    places = [None] * len(things) if relation else _places(words, len(things))
    sizes = _sizes(words, things)
    items = [
        ReadItem(shape=shape, colour=colour, size=size, column_and_row=place)
        for (_, _, shape, colour), size, place in zip(things, sizes, places, strict=True)
    ]
    return ReadScene(items=tuple(items[::-1] if is_inverse else items), background=background, relation=relation)


def read_motion(text: str) -> tuple[ReadScene, set[str]]:
    """Return the scene of a clip's caption, and the motions that its words fit."""
    text, background = _without_background(_plain(text))
    [(_, _, shape, colour)] = things = _things(text.split())
    item = ReadItem(shape=shape, colour=colour, size=_sizes(text.split(), things)[0])
    moving = re.sub(BEGINNINGS, "", text)
    motions = {name for name, pattern in MOTIONS.items() if re.search(rf"\b(?:{pattern})\b", moving)}
    return ReadScene(items=(item,), background=background), motions
