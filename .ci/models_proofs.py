"""Which tests build a checkpoint of which pipeline, and compare it with diffusers' own call.

Builders (functions of ``tests/pipelines/support/**/tiny*.py`` that write a checkpoint into a path) are run, and what
they write is opened: their pipelines are what it is. Files of tests are read for the builders that they name.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from pipelines.modular import open_modular

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "pipelines"
SUPPORT, REFERENCES = "tests.pipelines.support", "tests.pipelines.support.references"
COMPARED_WITH = ("diffusers", REFERENCES)
"""What a file imports from that compares."""


@cache
def proofs() -> dict[str, tuple[str, ...]]:
    """Files of tests by the modular pipelines that they build."""
    found: dict[str, list[str]] = {}
    for file in sorted((TESTS / "models").rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        if any(module.startswith(COMPARED_WITH) for module, _ in imports(tree).values()):
            for pipeline in sorted({pipeline_of(*builder) for builder in builders_in(tree)}):
                found.setdefault(pipeline, []).append(f"`{file.relative_to(TESTS)}`")
    return {pipeline: tuple(files) for pipeline, files in found.items()}


def builders_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of ``SUPPORT`` and their builders that are named there, or that make a fixture that is asked for."""
    modules, named = imports(tree), list(ast.walk(tree))
    for node in named:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module, name = modules[node.value.id]
            yield from builders(f"{module}.{name}", node.attr)
        elif isinstance(node, ast.Name) and node.id in modules:
            yield from builders(*modules[node.id])
        elif isinstance(node, ast.arg) and node.arg in fixtures():
            yield from fixtures()[node.arg]


@cache
def fixtures() -> dict[str, tuple[tuple[str, str], ...]]:
    """Builders that the fixtures for all tests of models call, by fixture."""
    tree = ast.parse((TESTS / "conftest.py").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    made = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {one.name: tuple(builders_in(ast.Module([*imported, *one.body], []))) for one in made}


def imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """(module, name) by the name that a file uses."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return found


def builders(module: str, name: str) -> Iterator[tuple[str, str]]:
    if module.startswith(f"{SUPPORT}.") and ".tiny" in module and _builder(module, name) is not None:
        yield module, name


@cache
def pipeline_of(module: str, name: str) -> str:
    """The class of the modular pipeline that the builder's checkpoint opens as."""
    make = _builder(module, name)
    assert make is not None
    with tempfile.TemporaryDirectory() as folder:
        return type(open_modular(make(Path(folder) / name))).__name__


def _builder(module: str, name: str) -> Callable[[Path], Path] | None:
    make: Any = getattr(import_module(module), name, None)
    if not callable(make) or isinstance(make, type):
        return None
    return make if next(iter(signature(make).parameters), None) == "path" else None
