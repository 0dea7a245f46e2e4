"""Phrases from templates.

`(a|b)` is a choice, `[...]` is left out where its field is unsaid, `{field}` is filled in. `~` is "a" or "an"; `@` is
that as well, or another article, or none.
"""

import random
import re
from collections.abc import Callable, Mapping
from functools import cache

Fields = Mapping[str, Callable[[], str]]
_CHOICE = re.compile(r"\(([^()]*)\)")
_OPTIONAL = re.compile(r"\[([^\[\]]*\{(\w+)\}[^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"([@~]) (\w)")
_ARTICLES = ("a",) * 12 + ("the", "the", "one", "one", "a single", "", "", "")


def chosen(template: str, rng: random.Random) -> str:
    """Return the template with one choice of each."""
    while "(" in template:
        template = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    return template


def with_articles(text: str, rng: random.Random) -> str:
    def article(match: re.Match[str]) -> str:
        word = rng.choice(_ARTICLES) if match[1] == "@" else "a"
        if word == "a" and match[2] in "aeiou":
            word = "an"
        return f"{word} {match[2]}".lstrip()

    return _ARTICLE.sub(article, text)


@cache
def needs(template: str) -> frozenset[str]:
    """Return the fields that the template needs."""
    return frozenset(_FIELD.findall(_OPTIONAL.sub("", template)))


@cache
def _sayable(templates: tuple[str, ...], said: frozenset[str]) -> tuple[str, ...]:
    return tuple(template for template in templates if needs(template) <= said)


def filled(template: str, fields: Fields, rng: random.Random) -> str:
    """Return the template in words."""
    text = _OPTIONAL.sub(lambda match: match[1] if match[2] in fields else "", template)
    return with_articles(_FIELD.sub(lambda match: fields[match[1]](), chosen(text, rng)), rng)


def phrase(templates: tuple[str, ...], fields: Fields, rng: random.Random) -> str:
    """Return one of the templates that need no other fields, in words."""
    return filled(rng.choice(_sayable(templates, frozenset(fields))), fields, rng)
