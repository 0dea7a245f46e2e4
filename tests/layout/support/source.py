"""The repository's own source, for the tests of its shape."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("engines", "pipelines", "deployments")
CODE = (*PACKAGES, "training")
Names = Iterator[tuple[int, str]]


@cache
def repository_files() -> tuple[str, ...]:
    """Return tracked files and new ones that git does not ignore, without those deleted in the work tree."""
    command = "git ls-files --cached --others --exclude-standard"
    listed = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return tuple(sorted({name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}))


def python_files(*folders: str) -> list[str]:
    chosen = tuple(f"{folder}/" for folder in folders)
    return [name for name in repository_files() if name.endswith(".py") and name.startswith(chosen)]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), filename=name)


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of ``ast.walk``: one walk serves all rules."""
    return tuple(ast.walk(tree_of(name)))


Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of statements, and of the clauses of ``try`` and ``match``, that contain statements."""


def functions_of(node: ast.AST) -> Iterator[Function]:
    """Yield all functions of a module, including nested ones. Expressions, most of its nodes, have none."""
    for name in BLOCKS:
        for inner in getattr(node, name, ()):
            if isinstance(inner, Function):
                yield inner
            yield from functions_of(inner)


@cache
def modules_named(name: str) -> tuple[tuple[int, str], ...]:
    """Return every absolute module that a file imports, or names in a string that looks like one of the project's."""
    return tuple(_modules_named(nodes_of(name)))


def _modules_named(nodes: Iterable[ast.AST]) -> Names:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Constant(value=str(text)) if re.fullmatch(rf"({'|'.join(CODE)})(\.\w+)+(:\w+)?", text):
                yield node.lineno, text


def top(module: str) -> str:
    return module.split(".")[0]
