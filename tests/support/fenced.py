"""Fenced code blocks of the project's documents, for the tests that run them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``line`` is where its text starts in ``document``, which is relative to the repository."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(*documents: str) -> list[Block]:
    """Return all blocks with a language, in order."""
    found = []
    for document in documents:
        whole = (ROOT / document).read_text()
        for match in FENCE.finditer(whole):
            line = whole.count("\n", 0, match.start("text")) + 1
            found.append(Block(document=document, line=line, language=match["language"], text=match["text"]))
    return found
