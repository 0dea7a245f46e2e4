"""Every message in docs/operate/troubleshooting.md is in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.layout.support.source import PACKAGES
from tests.support.fenced import ROOT

TEXT = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
ROW = re.compile(r"^\|(?: \d{3} \|)? `([^`]*)` \|", re.MULTILINE)
FORMATS = re.compile(r"%(?:\.\d+)?[sdgrf]|\{[^}]*\}")
MESSAGES = [message for message in ROW.findall(TEXT) if " " in message]


@cache
def pieces() -> tuple[str, ...]:
    """Return the constant text of every string in the packages, without its fields."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return tuple({piece for file in files for piece in constants(file.read_text()) if piece.strip()})


def constants(source: str) -> Iterator[str]:
    """Yield the constant parts of the strings of ``source``, without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from FORMATS.split(node.value)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    parts = [part for part in parts if len(part) > 2]
    assert parts
    assert [part for part in parts if not any(part in piece for piece in pieces())] == []


def test_a_message_that_nobody_writes_is_seen() -> None:
    assert not any("the gang is on strike" in piece for piece in pieces())
    assert list(constants('"a docstring"\nx = f"a {y} fits " "on %s"')) == ["a ", " fits on ", ""]


def test_the_table_is_read() -> None:
    assert len(MESSAGES) > 40
    assert {"At start", "In answers", "The log"} <= set(re.findall(r"^## (.*)$", TEXT, re.MULTILINE))
