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
from inspect import ismodule, signature
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
BUILDERS = re.compile(r"tests\.pipelines\.support\..*tiny")
COMPARED_WITH = ("diffusers", "tests.pipelines.support.references")
"""Packages that a file imports if it compares results."""
CLIP_MARKS, CONTROL_MARKS = ("InputVideo", "num_video_frames"), ("has_control",)
"""Names in files of tests that compare results with diffusers'."""
QUANTISED_TESTS = ("test_gguf.py", "test_scaled_files.py", "test_single_file.py")
Builder = Callable[[Path], Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A file of tests, below ``TESTS``, and the numbers of ranks on which it compares."""

    file: str
    num_ranks: tuple[int, ...]
    on_gpu: bool = False

    def on_one_rank(self) -> Proof:
        """Return the proof for a model that runs on one rank only."""
        return replace(self, num_ranks=(1,))

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.num_ranks))
        return f"`{self.file}` ({numbers}{', GPU' if self.on_gpu else ''})"


class Built(NamedTuple):
    """Class of a builder's modular pipeline, and its defaults."""

    pipeline: str
    defaults: Defaults


@cache
def proofs() -> dict[str, tuple[Proof, ...]]:
    """Return the files of tests by the modular pipelines that they build."""
    found: dict[str, tuple[Proof, ...]] = {}
    for file in test_files():
        if any(module.startswith(COMPARED_WITH) for module, _ in imports(file).values()):
            for pipeline in sorted(built_in(file)):
                found[pipeline] = (*found.get(pipeline, ()), proof_of(file))
    return found


def test_files() -> list[Path]:
    return sorted((TESTS / "models").rglob("test_*.py"))


@cache
def opened_file(file: Path) -> Any:
    return import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@cache
def imports(file: Path) -> dict[str, tuple[str, str]]:
    """Return modules, and names in them, by the name that a file uses."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return {one.asname or one.name: (str(node.module), one.name) for node in nodes for one in node.names}


def proof_of(file: Path) -> Proof:
    module = opened_file(file)
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    listed = (getattr(owner, "pytestmark", []) for owner in (module, *tests))
    marks = [mark for some in listed for mark in (some if isinstance(some, list) else [some])]
    numbers = {number for mark in marks for number in _numbers(mark)} | set(_gangs(ast.parse(file.read_text())))
    on_gpu = any(mark.name == "gpu" for mark in marks)
    return Proof(file=str(file.relative_to(TESTS)), num_ranks=tuple(sorted(numbers)) or (1,), on_gpu=on_gpu)


def _numbers(mark: Any) -> Iterator[int]:
    """Yield the values of the parameter ``num_ranks``."""
    if mark.name != "parametrize":
        return
    names, values = mark.args
    names = re.findall(r"\w+", names) if isinstance(names, str) else list(names)
    if "num_ranks" in names:
        for value in values:
            one = value.values if isinstance(value, ParameterSet) else value if len(names) > 1 else (value,)
            yield one[names.index("num_ranks")]


def _gangs(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of ranks in tests that compare; controls and refusals do not count."""
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
    """Return each builder that a test of models names, opened, once."""
    return tuple(map(opened, dict.fromkeys(maker for file in test_files() for maker in builders_in(file))))


def builders_in(file: Path) -> Iterator[Builder]:
    """Yield the builders that a file names, and those of the shared fixtures that its tests take."""
    yield from named_builders(file, file.read_text())
    fixtures = TESTS / "conftest.py"
    _, *parts = re.split(r"^def (\w+)", fixtures.read_text(), flags=re.M)
    taken = set(re.findall(r"(\w+): ", file.read_text()))
    for body in (body for name, body in zip(parts[::2], parts[1::2], strict=True) if name in taken):
        yield from named_builders(fixtures, body)


def named_builders(file: Path, text: str) -> Iterator[Builder]:
    """Yield the builders that ``text`` names, imported by ``file`` or in a module that it imports."""
    for name, (module, own_name) in imports(file).items():
        if BUILDERS.match(f"{module}.{own_name}"):
            value = getattr(import_module(module), own_name, None) or import_module(f"{module}.{own_name}")
            words = re.findall(rf"(?<![\w.]){name}\b(?:\.(\w+))?", text)
            values = (getattr(value, word, None) if ismodule(value) else value for word in words)
            yield from filter(is_builder, values)


def is_builder(value: Any) -> bool:
    is_function = callable(value) and not isinstance(value, type)
    return is_function and next(iter(signature(value).parameters), "") == "path"


@cache
def opened(make: Builder) -> Built:
    """Run a builder, and open what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model")
        return Built(pipeline=type(open_modular(path)).__name__, defaults=Checkpoint(path).defaults)


def opened_by(makers: Iterable[Builder]) -> frozenset[str]:
    """Return the pipelines of what ``makers`` write."""
    return frozenset(opened(make).pipeline for make in makers)


@cache
def built_in(file: Path) -> frozenset[str]:
    """Return the pipelines that a file of tests builds."""
    return opened_by(builders_in(file))


def marked(members: Iterable[str], marks: Iterable[str]) -> list[str]:
    """Return the files that prove one of these pipelines and have one of ``marks`` in their text."""
    files = sorted({proof.file for name in members for proof in proofs().get(name, ())})
    return [file for file in files if any(mark in (TESTS / file).read_text() for mark in marks)]


@cache
def uses() -> dict[str, dict[str, frozenset[str]]]:
    """Return the pipelines that files of tests compare, by use and file.

    Adapters with diffusers' own, adapters that come at run time with configured ones, quantised files with what they
    stand for, and offloaded blocks with blocks on the device.
    """
    every_adapter = {"lora/test_every_model.py": opened_by(model.make for model in every_model.MODELS.values())}
    every = opened_by(case.make for case in offloaded.CASES.values())
    files = {f"loading/{file}": built_in(TESTS / "loading" / file) for file in QUANTISED_TESTS}
    at_run_time = opened_by(jobs.MODELS[name] for name, _ in CASES)
    return {
        "adapters": {**every_adapter, "lora/test_jobs.py": opened_by(jobs.MODELS.values())},
        "at run time": {**every_adapter, "lora/test_runtime_loras.py": at_run_time},
        "quantised files": {"loading/test_every_family.py": every, **files},
        "blocks in host memory": {"blocks/test_offloaded_blocks.py": every - without_offload()},
    }


@cache
def without_offload() -> frozenset[str]:
    """Return the pipelines whose transformer has no blocks to offload: a U-Net."""
    return opened_by(offloaded.CASES[name].make for name in offloaded.WITHOUT)
