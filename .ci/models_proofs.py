"""Which tests build a checkpoint of which pipeline and compare it with diffusers' own call, and what families can do.

Builders (functions of ``tests/pipelines/support/**/tiny*.py`` that write a checkpoint into a path) are run, and what
they write is opened: their pipelines are what it is. Files of tests are read for the builders that they name.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from _pytest.mark import ParameterSet

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.directory import open_modular
from tests.pipelines.blocks import test_offloaded_blocks as offloaded
from tests.pipelines.lora.support import every_model, jobs
from tests.pipelines.lora.test_runtime_loras import CASES

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "pipelines"
SUPPORT, REFERENCES = "tests.pipelines.support", "tests.pipelines.support.references"
COMPARED_WITH = ("diffusers", REFERENCES)
"""What a file imports from that compares."""
USE_COLUMNS = "models|recipes|clip along|control picture|adapters|at run time|quantised files|blocks in host memory"
RECIPES_TEST = "../deployments/requests/test_recipes.py"
CLIP_MARKS, CONTROL_MARKS = ("InputVideo", "num_video_frames"), ("has_control",)
"""Names in files of tests that compare results with diffusers'."""
QUANTISED_TESTS = ("test_gguf.py", "test_scaled_files.py", "test_single_file.py")
NO, UNPROVED = "—", "untested"


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


class Built(NamedTuple):
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
    listed = (getattr(owner, "pytestmark", []) for owner in (module, *tests))
    marks = [mark for some in listed for mark in (some if isinstance(some, list) else [some])]
    numbers = {number for mark in marks for number in _numbers(mark)} | set(_gangs(tree))
    on_gpu = any(mark.name == "gpu" for mark in marks)
    return Proof(file=str(file.relative_to(TESTS)), num_ranks=tuple(sorted(numbers)) or (1,), on_gpu=on_gpu)


def _numbers(mark: Any) -> Iterator[int]:
    """Values of the parameter ``num_ranks``."""
    if mark.name != "parametrize":
        return
    names, values = mark.args
    names = re.findall(r"\w+", names) if isinstance(names, str) else list(names)
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
                calls = (node for node in ast.walk(test) if isinstance(node, ast.Call) and _is_gang(node.func))
                yield from (one.value for call in calls for one in call.args if isinstance(one, ast.Constant))


def _is_gang(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "gang"


@cache
def built() -> tuple[Built, ...]:
    """Of all builders that a test of models names, each once."""
    files = sorted((TESTS / "models").rglob("test_*.py"))
    named = {builder for file in files for builder in builders_in(ast.parse(file.read_text()))}
    return tuple(build(*builder) for builder in sorted(named))


def builders_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of ``SUPPORT`` and their builders that are named there, or that make a fixture that is asked for."""
    yield from builders_called(tree)
    asked = (node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    for name in asked:
        yield from fixtures().get(name, ())


def builders_called(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of ``SUPPORT`` and their builders that are named there."""
    modules = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module, name = modules[node.value.id]
            yield from builders(f"{module}.{name}", node.attr)
        elif isinstance(node, ast.Name) and node.id in modules:
            yield from builders(*modules[node.id])


@cache
def fixtures() -> dict[str, tuple[tuple[str, str], ...]]:
    """Builders that the fixtures for all tests of models call, by fixture."""
    tree = ast.parse((TESTS / "conftest.py").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    made = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {one.name: tuple(builders_called(ast.Module([*imported, *one.body], []))) for one in made}


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
    """Yield both if they name a builder: a function whose first parameter is ``path``."""
    if module.startswith(f"{SUPPORT}.") and ".tiny" in module:
        make: Any = getattr(import_module(module), name, None)
        if callable(make) and not isinstance(make, type) and next(iter(signature(make).parameters), None) == "path":
            yield module, name


@cache
def build(module: str, name: str) -> Built:
    return opened(getattr(import_module(module), name))


@cache
def opened(make: Callable[[Path], Path]) -> Built:
    """Run a builder, and open what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model")
        return Built(pipeline=type(open_modular(path)).__name__, defaults=Checkpoint(path).defaults)


def use_row(
    title: str, members: frozenset[str], models: Iterable[str], defaults: Iterable[Defaults]
) -> tuple[str, ...]:
    """Return the cells of the pipelines ``members``, by their classes' names, with their published ``models``."""
    opened_models = [Checkpoint.of_configuration(model) for model in models]
    names = dict.fromkeys(name for one in opened_models for name in one.spec.recipes(one.path))
    # A control network may lie apart from its model: a class of the model says which.
    has_control = any(one.spec.control_part for one in opened_models)
    without_blocks = opened_by(*(offloaded.CASES[name].make for name in offloaded.WITHOUT))  # a U-Net
    adapters, at_run_time, quantised, offload = (
        _all_of(file for file, built in files.items() if built & members) or UNPROVED for files in uses()
    )
    return (
        title,
        f"{', '.join(names)}: `{RECIPES_TEST}`" if names else NO,
        _marked(members, CLIP_MARKS) if any(one.max_video_frames > 0 for one in defaults) else NO,
        _marked(members, CONTROL_MARKS) if has_control else NO,
        adapters,
        at_run_time,
        quantised,
        NO if members & without_blocks else offload,
    )


def _marked(members: Iterable[str], marks: tuple[str, ...]) -> str:
    found = {proof.file for name in members for proof in proofs().get(name, ())}
    named = (file for file in sorted(found) if any(mark in (TESTS / file).read_text() for mark in marks))
    return _all_of(named) or UNPROVED


@cache
def uses() -> tuple[dict[str, frozenset[str]], ...]:
    """Return the pipelines that files of tests compare, by file.

    Adapters with diffusers' own, adapters that come at run time with configured ones, quantised files with what they
    stand for, and offloaded blocks with blocks on the device.
    """
    every_adapter = opened_by(*(model.make for model in every_model.MODELS.values()))
    every = opened_by(*(case.make for case in offloaded.CASES.values()))
    kept = opened_by(*(case.make for name, case in offloaded.CASES.items() if name not in offloaded.WITHOUT))
    at_run_time = opened_by(*(jobs.MODELS[name] for name, _ in CASES))
    return (
        {"lora/test_every_model.py": every_adapter, "lora/test_jobs.py": opened_by(*jobs.MODELS.values())},
        {"lora/test_every_model.py": every_adapter, "lora/test_runtime_loras.py": at_run_time},
        {"loading/test_every_family.py": every, **{f"loading/{file}": built_in(file) for file in QUANTISED_TESTS}},
        {"blocks/test_offloaded_blocks.py": kept},
    )


def opened_by(*makers: Callable[[Path], Path]) -> frozenset[str]:
    """Return the pipelines of what ``makers`` write."""
    return frozenset(opened(make).pipeline for make in makers)


def built_in(file: str) -> frozenset[str]:
    """Return the pipelines that a file of ``tests/pipelines/loading`` builds."""
    tree = ast.parse((TESTS / "loading" / file).read_text())
    return frozenset(build(*builder).pipeline for builder in builders_in(tree))


def _all_of(files: Iterable[str]) -> str:
    return ", ".join(f"`{file}`" for file in files)
