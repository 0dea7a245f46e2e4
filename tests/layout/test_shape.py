"""There are no import circles, no crowded folders, and no name for two things."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.layout.support.source import CODE, PACKAGES, ROOT, python_files, repository_files, tree_of

MAX_FILES = 23
"""Python files in one folder, without ``__init__.py``: as many as in starlette's widest."""

MAX_SAME_NAMES = 3


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the project's modules that a file imports, also inside a function or for types alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= parts or {node.module}
    return found & modules


def test_no_import_leads_back() -> None:
    files = python_files(*CODE, "benchmarks")
    modules = {module_of(name) for name in files}
    graph = {module_of(name): imported(tree_of(name), modules) - {module_of(name)} for name in files}
    for package in (name for name in modules if any(other.startswith(f"{name}.") for other in modules)):
        graph[package] -= {module for module in graph[package] if module.startswith(f"{package}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def paths_of(tree: str) -> set[str]:
    """Return the paths in the indented tree of a document, two spaces a level."""
    paths, above = set[str](), list[str]()
    for line in tree.splitlines():
        above[(len(line) - len(line.lstrip())) // 2 :] = [line.split()[0]]
        paths.add("".join(above))
    return paths


def test_the_architecture_names_every_folder() -> None:
    """A stale tree misleads its readers."""
    text = (ROOT / "docs/inside/architecture.md").read_text()
    paths = paths_of(text.partition("## Folders\n\n```\n")[2].partition("```")[0])
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    folders = {"/".join(Path(name).parts[:2]) + "/" for name in python_files(*PACKAGES) if name.count("/") > 1}
    assert folders - paths == set()


def test_core_imports_nothing_else_of_engines() -> None:
    files = python_files("engines/core")
    nodes = [(name, node) for name in files for node in ast.walk(tree_of(name)) if isinstance(node, ast.ImportFrom)]
    strangers = [
        f"{name}:{node.lineno} imports {node.module}"
        for name, node in nodes
        if str(node.module).split(".")[0] in CODE and not str(node.module).startswith("engines.core")
    ]
    assert files
    assert strangers == []


def test_no_folder_is_crowded() -> None:
    files = [Path(name) for name in python_files(*CODE, "benchmarks", "tests")]
    counts = Counter(str(file.parent) for file in files if file.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_a_file_name_occurs_three_times_at_most() -> None:
    """Families of models have the same files each."""
    files = [Path(name) for name in python_files(*PACKAGES) if not name.startswith("pipelines/models/")]
    counts = Counter(file.name for file in files if file.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > MAX_SAME_NAMES} == {}


def test_no_two_public_classes_bear_one_name() -> None:
    places: dict[str, list[str]] = {}
    for name in python_files(*PACKAGES):
        for node in tree_of(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_merge_is_unresolved() -> None:
    marks = tuple(sign * 7 + b" " for sign in (b"<", b">"))
    lines = ((name, line) for name in repository_files() for line in (ROOT / name).read_bytes().splitlines())
    assert [name for name, line in lines if line.startswith(marks)] == []
