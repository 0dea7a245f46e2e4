"""The imports of a notebook's cells exist, found without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.fenced import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_import_resolves(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    written = {source.split()[1].removesuffix(".py") for source in sources if source.startswith("%%writefile ")}
    found = [one for source in sources for one in imports(source) if one[0] not in written]
    assert len(found) > 3
    assert [one for one in found if not resolves(*one)] == []


def test_a_name_that_has_moved_is_seen() -> None:
    cell = "%%writefile my.py\nfrom pipelines.models import flux9\nimport pipelines.nowhere\nimport os, json as j"
    assert [resolves(*one) for one in imports(cell)] == [False, False, True, True]


def imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield the modules that a cell imports, each with an imported name, if any. Skip lines of magic."""
    lines = ("" if line.startswith(("%", "!")) else line for line in source.splitlines())
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "a notebook is in no package"
            yield from ((node.module, alias.name) for alias in node.names)


def resolves(module: str, name: str | None) -> bool:
    """Return True if ``import module``, or ``from module import name``, succeeds."""
    try:
        if name is None or hasattr(import_module(module), name):
            return import_module(module) is not None
        return import_module(f"{module}.{name}") is not None
    except ImportError:
        return False
