"""Files and functions have a maximal size, and each file has its place."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.layout.support.source import (
    CODE,
    ROOT,
    Function,
    functions_of,
    nodes_of,
    python_files,
    repository_files,
    tree_of,
)

CHECKPOINTS = "pipelines/checkpoints/"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_CHECKPOINT_BYTES = 42_000_000
MAX_REPOSITORY_BYTES = 50_000_000
MAX_TWIN_BYTES = 50_000


def test_files_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in repository_files() if name[-3:] == ".py"}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def length(function: Function) -> int:
    """Return lines from ``def`` to the end, without the docstring and nested functions, which count by themselves."""
    inside = [node for node in ast.walk(function) if isinstance(node, Function) and node is not function]
    apart = [function.body[0]] if ast.get_docstring(function) else []
    skipped = {line for node in apart + inside for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(set(range(function.lineno, (function.end_lineno or 0) + 1)) - skipped)


def test_functions_are_short() -> None:
    offenders = [
        f"{name}:{function.lineno} {function.name} has {length(function)} lines"
        for name in repository_files()
        if name.endswith(".py")
        for function in functions_of(tree_of(name))
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
        if length(function) > MAX_FUNCTION_LINES
    ]
    assert offenders == []


def test_functions_are_found_wherever_they_are() -> None:
    names = sorted({name for name in repository_files() if name.endswith(".py")})[::20]
    assert len(names) > 50
    for name in names:
        walked = [node for node in nodes_of(name) if isinstance(node, Function)]
        assert {id(one) for one in functions_of(tree_of(name))} == {id(one) for one in walked}, name


def test_every_folder_with_code_is_a_package() -> None:
    folders = {Path(name).parent for name in python_files(*CODE)}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_tests_mirror_the_tree() -> None:
    """A folder of tests is named like a package, or a module whose tests share a set-up; ``support`` has helpers."""
    files = python_files(*(f"tests/{name}" for name in CODE))
    folders = {Path(name).parent.relative_to("tests") for name in files if "/support/" not in name}
    unknown = [folder for folder in folders if not (ROOT / folder).is_dir() and not (ROOT / f"{folder}.py").is_file()]
    assert unknown == []


def test_no_text_mentions_a_place_on_somebodys_machine() -> None:
    places = re.compile(rb"(?<![\w.])/(work|root|home/[a-z]+|Users/[a-z]+)/")
    texts = [name for name in repository_files() if not name.startswith((CHECKPOINTS, "docs/images/"))]
    offenders = [
        f"{name}: {found.group().decode()}" for name in texts if (found := places.search((ROOT / name).read_bytes()))
    ]
    assert offenders == []


def total_bytes(prefix: str) -> int:
    return sum(os.lstat(ROOT / name).st_size for name in repository_files() if name.startswith(prefix))


def test_checkpoints_and_repository_stay_small() -> None:
    assert total_bytes(CHECKPOINTS) <= MAX_CHECKPOINT_BYTES
    assert total_bytes("") < MAX_REPOSITORY_BYTES


def test_no_large_file_is_there_twice() -> None:
    """Checkpoints that share a part have a link to it. Wheels and source distributions have the file in its place."""
    names: dict[str, list[str]] = {}
    for name in repository_files():
        if not (file := ROOT / name).is_symlink() and file.stat().st_size > MAX_TWIN_BYTES:
            names.setdefault(hashlib.sha256(file.read_bytes()).hexdigest(), []).append(name)
    assert [twins for twins in names.values() if len(twins) > 1] == []


def test_every_folder_of_tests_has_a_budget_of_cpu_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    program, report = importlib.import_module("durations"), tmp_path / "durations.xml"
    budget_s = json.loads((ROOT / "tests" / "budget.json").read_text())
    tests = (Path(name) for name in repository_files() if re.match(r"tests/(.*/)?test_\w+\.py$", name))
    assert set(budget_s) == {"/".join(path.parts[:2]) if len(path.parts) > 2 else "tests" for path in tests}

    case = '<testcase classname="tests.layout.test_size" name="a" time="1"><properties>{}</properties></testcase>'
    used_s = budget_s["tests/layout"] + 1
    used = f'<property name="cpu_s" value="{used_s}"/>'
    report.write_text(f"<testsuite>{case.format(used)}</testsuite>")
    (told,) = program.over_budget(program.cpu_s(report), budget_s)
    assert told.startswith(f"tests/layout takes {used_s} CPU seconds")
    assert program.over_budget({"tests/layout": budget_s["tests/layout"]}, budget_s) == []
