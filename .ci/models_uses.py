"""The table of docs/reference/models.md that says what each family can be used with, and which tests prove it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from models_proofs import TESTS, build, builders_in, opened, proofs

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from tests.pipelines.blocks import test_offloaded_blocks as offloaded
from tests.pipelines.lora.support import every_model, jobs
from tests.pipelines.lora.test_runtime_loras import CASES

COLUMNS = (
    "models",
    "recipes",
    "clip along",
    "control picture",
    "adapters",
    "at run time",
    "quantised files",
    "blocks in host memory",
)
RECIPES_TEST = "../deployments/requests/test_recipes.py"
CLIP_MARKS, CONTROL_MARKS = ("InputVideo", "num_video_frames"), ("has_control",)
"""Names in files of tests that compare results with diffusers'."""
QUANTISED_TESTS = ("test_gguf.py", "test_scaled_files.py", "test_single_file.py")
NO, UNPROVED = "—", "untested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Pipelines of one title, by their classes' names, with their published models and the defaults of all of them."""

    title: str
    pipelines: frozenset[str]
    models: tuple[str, ...]
    defaults: tuple[Defaults, ...]

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        return (
            self.title,
            self._recipes(),
            self._if_any(lambda one: one.max_video_frames > 0, self._marked(CLIP_MARKS)),
            self._control(),
            _all_of(file for file, built in with_adapters().items() if built & self.pipelines) or UNPROVED,
            _all_of(file for file, built in with_runtime_adapters().items() if built & self.pipelines) or UNPROVED,
            _all_of(file for file, built in with_quantised_files().items() if built & self.pipelines) or UNPROVED,
            self._offload(),
        )

    def _recipes(self) -> str:
        opened = [Checkpoint.of_configuration(model) for model in self.models]
        names = dict.fromkeys(name for one in opened for name in one.spec.recipes(one.path))
        return f"{', '.join(names)}: `{RECIPES_TEST}`" if names else NO

    def _control(self) -> str:
        """A network may lie apart from its model: a class of the model says which."""
        specs = [Checkpoint.of_configuration(model).spec for model in self.models]
        return (self._marked(CONTROL_MARKS) or UNPROVED) if any(spec.control_part for spec in specs) else NO

    def _offload(self) -> str:
        """A U-Net has no blocks that could be elsewhere."""
        if self.pipelines & opened_by(*(offloaded.CASES[name].make for name in offloaded.WITHOUT)):
            return NO
        return _all_of(file for file, built in with_offload().items() if built & self.pipelines) or UNPROVED

    def _if_any(self, can: Callable[[Defaults], bool], proof: str) -> str:
        return (proof or UNPROVED) if any(map(can, self.defaults)) else NO

    def _marked(self, marks: tuple[str, ...]) -> str:
        found = {proof.file for name in sorted(self.pipelines) for proof in proofs().get(name, ())}
        return _all_of(file for file in sorted(found) if any(mark in (TESTS / file).read_text() for mark in marks))


def with_adapters() -> dict[str, frozenset[str]]:
    """Return the pipelines whose adapters are compared with diffusers' own, by the file of tests."""
    return {"lora/test_every_model.py": of_every_model(), "lora/test_jobs.py": opened_by(*jobs.MODELS.values())}


def with_runtime_adapters() -> dict[str, frozenset[str]]:
    """Return the pipelines on which adapters that come at run time are compared with configured ones."""
    tested = (jobs.MODELS[name] for name, _ in CASES)
    return {"lora/test_every_model.py": of_every_model(), "lora/test_runtime_loras.py": opened_by(*tested)}


def with_quantised_files() -> dict[str, frozenset[str]]:
    """Return the pipelines whose quantised files are compared with what they stand for."""
    every = opened_by(*(case.make for case in offloaded.CASES.values()))
    return {"loading/test_every_family.py": every, **{f"loading/{file}": built_in(file) for file in QUANTISED_TESTS}}


def with_offload() -> dict[str, frozenset[str]]:
    """Return the pipelines whose jobs are compared with those without offloaded blocks."""
    cases = (case for name, case in offloaded.CASES.items() if name not in offloaded.WITHOUT)
    return {"blocks/test_offloaded_blocks.py": opened_by(*(case.make for case in cases))}


def of_every_model() -> frozenset[str]:
    return opened_by(*(model.make for model in every_model.MODELS.values()))


@cache
def opened_by(*makers: Callable[[Path], Path]) -> frozenset[str]:
    """Return the pipelines of what ``makers`` write."""
    return frozenset(opened(make).pipeline for make in makers)


@cache
def built_in(file: str) -> frozenset[str]:
    """Return the pipelines that a file of ``tests/pipelines/loading`` builds."""
    tree = ast.parse((TESTS / "loading" / file).read_text())
    return frozenset(build(*builder).pipeline for builder in builders_in(tree))


def _all_of(files: Iterable[str]) -> str:
    return ", ".join(f"`{Path(file).as_posix()}`" for file in files)
