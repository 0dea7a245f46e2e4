"""Which tests build a checkpoint of which pipeline, and compare it with diffusers' own call.

Builders (functions of ``tests/pipelines/support/**/tiny*.py`` that write a checkpoint into a path) are run, and what
they write is opened: their pipelines are what it is. Files of tests are read for the builders that they name.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from _pytest.mark import ParameterSet

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.directory import open_modular

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "pipelines"
SUPPORT, REFERENCES = "tests.pipelines.support", "tests.pipelines.support.references"
COMPARED_WITH = ("diffusers", REFERENCES)
"""What a file imports from that compares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A file of tests, below ``TESTS``, and the numbers of ranks on which it compares."""

    file: str
    num_ranks: tuple[int, ...]
    on_gpu: bool = False

    def on_one_rank(self) -> Proof:
        """What it proves of a model that runs on one rank alone."""
        return replace(self, num_ranks=(1,))

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.num_ranks))
        return f"`{self.file}` ({numbers}{', GPU' if self.on_gpu else ''})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a builder's checkpoint opens as: its modular pipeline's class, and its defaults."""

    pipeline: str
    defaults: Defaults


@cache
def proofs() -> dict[str, tuple[Proof, ...]]:
    """Files of tests by the modular pipelines that they build."""
    found: dict[str, list[Proof]] = {}
    for file in sorted((TESTS / "models").rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        if any(module.startswith(COMPARED_WITH) for module, _ in imports(tree).values()):
            proof = proof_of(file, tree)
            for pipeline in sorted({build(*builder).pipeline for builder in builders_in(tree)}):
                found.setdefault(pipeline, []).append(proof)
    return {pipeline: tuple(files) for pipeline, files in found.items()}


def proof_of(file: Path, tree: ast.Module) -> Proof:
    module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    marks = [mark for test in (module, *tests) for mark in _marks(test)]
    numbers = {number for mark in marks for number in _numbers(mark)} | set(_gangs(tree))
    on_gpu = any(mark.name == "gpu" for mark in marks)
    return Proof(file=str(file.relative_to(TESTS)), num_ranks=tuple(sorted(numbers)) or (1,), on_gpu=on_gpu)


def _marks(owner: Any) -> list[Any]:
    marks = getattr(owner, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def _numbers(mark: Any) -> Iterator[int]:
    """Values of the parameter ``num_ranks``."""
    if mark.name != "parametrize":
        return
    names, values = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if "num_ranks" in names:
        for value in values:
            one = value.values if isinstance(value, ParameterSet) else value if len(names) > 1 else (value,)
            yield one[names.index("num_ranks")]


def _gangs(tree: ast.Module) -> Iterator[int]:
    """Numbers of ranks that are written where something is compared: controls and refusals do without."""
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            if "one_rank" in test.name:
                yield 1
            if "without" not in test.name and "raises" not in ast.dump(test):
                calls = (node for node in ast.walk(test) if isinstance(node, ast.Call) and _name(node.func) == "gang")
                yield from (one.value for call in calls for one in call.args if isinstance(one, ast.Constant))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


@cache
def built() -> tuple[Built, ...]:
    """Of all builders that a test of models names, each once."""
    files = sorted((TESTS / "models").rglob("test_*.py"))
    named = {builder for file in files for builder in builders_in(ast.parse(file.read_text()))}
    return tuple(build(*builder) for builder in sorted(named))


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
def build(module: str, name: str) -> Built:
    make = _builder(module, name)
    assert make is not None
    return opened(make)


def opened(make: Callable[[Path], Path]) -> Built:
    """Run a builder, and open what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model")
        return Built(pipeline=type(open_modular(path)).__name__, defaults=Checkpoint(path).defaults)


def _builder(module: str, name: str) -> Callable[[Path], Path] | None:
    make: Any = getattr(import_module(module), name, None)
    if not callable(make) or isinstance(make, type):
        return None
    return make if next(iter(signature(make).parameters), None) == "path" else None
