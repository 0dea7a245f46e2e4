"""Tables of documents: their text, and their places between two marks."""

from __future__ import annotations

from collections.abc import Iterable


def table(columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def replaced(document: str, name: str, tables: str) -> str:
    """Return ``document`` with ``tables`` between the marks of ``name``."""
    begin, end = f"<!-- {name}: ", f"<!-- end of {name} -->"
    before, rest = document.split(begin)
    program, rest = rest.split(" -->\n", 1)
    _, after = rest.split(end)
    return f"{before}{begin}{program} -->\n{tables}{end}{after}"
