"""Decide whether a grammar of templates can say a text: exactly, without random samples.

Case, punctuation and articles are ignored on both sides, and any part of a kind fits anywhere. So some derivable texts
never occur in training, and none that could is missed.
"""

import re
from collections.abc import Mapping
from functools import reduce
from operator import or_

from training.shapes.scenes import BACKGROUNDS, PLACES
from training.shapes.wording.motions import FORMS, OWN_TOWARDS, OWN_VERBS, VERBS
from training.shapes.wording.phrases import Wording
from training.shapes.wording.words import (
    COLOUR_WORDS,
    CORNER_SIDES,
    RELATION_WORDS,
    ROW_WORDS,
    SHAPE_WORDS,
    SIDES,
    SIZE_WORDS,
)

ARTICLES = frozenset({"a", "an", "the", "one", "single"})
Rules = Mapping[str, tuple[str, ...]]
Node = str | list[list["Node"]]  # a word, "{field}", or alternatives, each a sequence
_TOKEN = re.compile(r"\{\w+\}|[()|]|[A-Za-z']+")


def words_of(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z']+", text.lower()) if word not in ARTICLES]


def _alternatives(tokens: list[str]) -> list[list[Node]]:
    """Consume tokens up to the bracket that closes, or all, and return their meaning."""
    found: list[list[Node]] = [[]]
    while tokens and (token := tokens.pop(0)) != ")":
        if token == "(":
            found[-1].append(_alternatives(tokens))
        elif token == "|":
            found.append([])
        elif token.startswith("{"):
            found[-1].append(token)
        elif token.lower() not in ARTICLES:
            found[-1].append(token.lower())
    return found


class Grammar:
    """Rules that a text may follow; every template may omit what stands in [...]."""

    def __init__(self, rules: Rules) -> None:
        self.rules = {
            f"{{{name}}}": [_alternatives(_TOKEN.findall(text.replace("[", "(").replace("]", "|)"))) for text in texts]
            for name, texts in rules.items()
        }

    def derives(self, text: str) -> bool:
        words = words_of(text)
        return bool(_Derivation(self.rules, words).ends("{caption}", 1) >> len(words))


class _Derivation:
    """One text, and the ends of each rule. Places are bits of a number: bit 3 stands before the fourth word."""

    def __init__(self, rules: Mapping[str, list[list[list[Node]]]], words: list[str]) -> None:
        self.rules = rules
        self.places = {word: sum(1 << place for place, other in enumerate(words) if other == word) for word in words}
        self.known: dict[tuple[str, int], int] = {}

    def ends(self, node: Node, starts: int) -> int:
        """Return the places where a node can end that begins at one of these."""
        if isinstance(node, list):
            return self._any(node, starts)
        if not node.startswith("{"):
            return (starts & self.places.get(node, 0)) << 1
        if (node, starts) not in self.known:
            self.known[node, starts] = reduce(or_, (self._any(template, starts) for template in self.rules[node]), 0)
        return self.known[node, starts]

    def _any(self, alternatives: list[list[Node]], starts: int) -> int:
        return reduce(or_, (self._after(sequence, starts) for sequence in alternatives), 0)

    def _after(self, sequence: list[Node], starts: int) -> int:
        for node in sequence:
            if not starts:
                break
            starts = self.ends(node, starts)
        return starts


def _verbs(wording: Wording, form: int) -> tuple[str, ...]:
    led = [
        f"{verb[form]} {towards}"
        for table, leads in ((VERBS, wording.towards), (OWN_VERBS, OWN_TOWARDS))
        for motion, verbs in table.items()
        for verb in verbs
        for towards in leads.get(motion, ("",))
    ]
    return tuple(dict.fromkeys(led))


def free_rules(wording: Wording) -> dict[str, tuple[str, ...]]:
    """Return the rules of a free wording."""
    templates = wording.templates
    at = (*(text for texts in wording.places_at.values() for text in texts), *wording.corners_at)
    relations = tuple(text for pair in RELATION_WORDS.values() for text in pair)
    rules = {
        "caption": ("[{opening} ]{whole}( please|)", "[{opening} ]{body}( please|)"),
        "opening": templates.opening,
        "body": (*templates.one, *templates.pair, *templates.relation, *templates.places, *templates.motion),
        "whole": templates.whole,
        "on": templates.on,
        "ground": templates.ground,
        "colour": tuple(COLOUR_WORDS.get(name, name) for name in BACKGROUNDS),
        "shape": tuple(SHAPE_WORDS.values()),
        "size": tuple(SIZE_WORDS.values()),
        "row": tuple(ROW_WORDS.values()),
        "end": tuple(ROW_WORDS),
        "column": ("left", "right"),
        "item": wording.things,
    }
    rules |= dict.fromkeys(("first", "second"), wording.things)
    rules |= dict.fromkeys(("at", "at1", "at2"), at)
    rules |= dict.fromkeys(("side", "side1", "side2"), (*SIDES.values(), CORNER_SIDES))
    rules |= dict.fromkeys(("part1", "part2"), templates.part)
    rules |= dict.fromkeys(("relation", "inverse"), relations)
    return rules | {name: _verbs(wording, form) for form, name in enumerate(FORMS)}


_PLAIN_MOVES = "(moves|moving|that moves|slides|is moving|goes)"
PLAIN_RULES: Rules = {
    "caption": ("(picture of|drawing of|image of|) {whole}",),
    "whole": ("{body}", "{body} (on|with|against|) {ground}", "on {ground} {body}"),
    "ground": ("{colour} background",),
    "body": (
        "{item}[ {at}][ and {item}[ {at}]]",
        "{item} (above|over|on top of|below|under|beneath|to the left of|left of|to the right of|right of) {item}",
        f"{{item}} {_PLAIN_MOVES} from (right to left|left to right|bottom to top|top to bottom)",
        f"{{item}} {_PLAIN_MOVES} (to the left|left|to the right|right|up|upwards|down|downwards)",
        "{item} (grows|growing|gets bigger|that grows|becomes larger|is growing)",
        "{item} (shrinks|shrinking|gets smaller|that shrinks|becomes smaller|is shrinking)",
        "{item} (turns|turning|rotates|spins|that turns|is rotating|spinning)",
    ),
    "item": ("[{size} ]{colour} {shape}",),
    "shape": ("circle", "square", "triangle", "star"),
    "size": ("small", "little", "tiny", "large", "big", "huge"),
    "colour": (*(name for name in BACKGROUNDS), "violet", "gray"),
    "at": (
        "(in|at) (centre|center|middle)",
        "(on|at|to) (left|right)( side|)",
        "(at|on|near) (top|bottom)",
        *(f"(at|in|) {place}( corner|)" for place in PLACES if " " in place),
        "in (upper|lower) (left|right) corner",
    ),
}
