"""Imports go one way, and some names are allowed in few files only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest

from deployments.worker_shim import LEVELS
from deployments.zygote import LIBRARIES
from tests.layout.support.source import CODE, PACKAGES, ROOT, Names, modules_named, nodes_of, python_files, top, tree_of

MAY_IMPORT = {
    "engines": {"engines"},
    "pipelines": {"engines", "pipelines"},
    "deployments": set(PACKAGES),
    "training": {"engines", "pipelines", "training"},
}
HTTP_LIBRARIES = {"aiohttp", "fastapi", "flask", "httpx", "openai", "requests", "starlette", "uvicorn"}
PURE = (
    "engines/gang/arbiter.py",
    "engines/gang/share_group.py",
    "engines/gang/autoscaling.py",
    "engines/gang/eta/prediction.py",
    "engines/gang/eta/simulation.py",
    "engines/gang/jobs/job.py",
    "engines/gang/jobs/scheduler.py",
    "engines/gang/jobs/step_plan.py",
    "engines/gang/load.py",
    "engines/gang/policies/",
)
"""Modules of a gang's decisions."""
REGISTRY = "pipelines/models/registry.py"
OWN_FILES = ("pipelines/models/",)
"""Places of a family's own files: a folder, or a file, that begins with its word."""
WORD = r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])"
PRIVATE = {"ray": "deployments/ray_private.py", "torch": "engines/core/torch_private.py"}
"""Files where the private names of a library may be used."""
READS_TESTS = ".ci/models_proofs.py"
SETTINGS = "deployments/settings.py"
START_PROCESSES = {
    "deployments/forked_worker.py",
    "deployments/worker_shim.py",
    "deployments/zygote.py",
}
"""Files of the process that workers fork from: they pass whole environments on, before settings are read."""
SET_VARIABLES_OF_LIBRARIES = {
    "engines/core/weight_spans.py",
    "deployments/cli/serving.py",
    "engines/tensorrt_engine/run/doctor.py",
    "engines/torch_engine/exchange/peer_memory.py",
    "pipelines/component_weights.py",
}
"""Files that write variables which a library reads later in the same process, or in its children; they read none."""


def forbidden_imports(names: list[str], forbidden: Callable[[str, str], bool]) -> list[str]:
    """Return the forbidden imports of the files. ``forbidden`` gets the file and the module."""
    return [
        f"{name}:{line} names {module}"
        for name in names
        for line, module in modules_named(name)
        if forbidden(name, module)
    ]


def test_imports_go_from_deployments_to_pipelines_to_engines() -> None:
    def upward(name: str, module: str) -> bool:
        return top(module) in CODE and top(module) not in MAY_IMPORT[name.split("/")[0]]

    assert forbidden_imports(python_files(*CODE), upward) == []


def test_imports_are_absolute() -> None:
    nodes = [(name, node) for name in python_files(*CODE) for node in nodes_of(name)]
    assert [f"{name}:{node.lineno}" for name, node in nodes if isinstance(node, ast.ImportFrom) and node.level] == []


def test_nothing_that_is_served_imports_training_tests_or_benchmarks() -> None:
    for_developers = {"tests", "benchmarks", "training"}
    assert forbidden_imports(python_files(*PACKAGES), lambda _, module: top(module) in for_developers) == []


def test_nothing_outside_of_tests_imports_tests() -> None:
    """One file reads tests as data, to document what they prove."""
    files = [name for name in python_files(*CODE, "benchmarks", ".ci") if name != READS_TESTS]
    assert any(name.startswith("benchmarks/serving/") for name in files), "folders have other names"
    assert forbidden_imports(files, lambda _, module: top(module) == "tests") == []
    assert forbidden_imports([READS_TESTS], lambda _, module: top(module) == "tests") != []


def is_command_line(_: str, module: str) -> bool:
    return module.split(".")[:2] == ["deployments", "cli"]


def test_what_is_served_does_not_need_the_command_line() -> None:
    """Code that a command shares with the application is beside both, such as ``deployments/sizing``."""
    files = [name for name in python_files(*PACKAGES) if not name.startswith("deployments/cli/")]
    assert forbidden_imports(files, is_command_line) == []
    assert forbidden_imports(["deployments/cli/main.py"], is_command_line) != []


def test_ray_is_known_to_deployments_and_gangs_alone() -> None:
    others = [name for name in python_files("engines", "pipelines") if not name.startswith("engines/gang/")]
    assert forbidden_imports(others, lambda _, module: top(module) == "ray") == []


def is_impure(name: str, module: str) -> bool:
    """Return whether a decision module may not import it: time, chance, tasks, ranks, and modules that use them."""
    if top(module) in {"asyncio", "datetime", "random", "ray", "threading", "time"}:
        return True
    is_own = top(module) in CODE and not module.startswith("engines.core.")
    return is_own and not f"{module.partition(':')[0].replace('.', '/')}.py".startswith(PURE)


def test_what_decides_in_a_gang_knows_no_clock_and_no_ranks() -> None:
    """The same jobs in the same order get the same plans, in a rebuilt gang and in a simulation."""
    files = [name for name in python_files("engines/gang") if name.startswith(PURE)]
    assert len(files) > len(PURE), "files have other names"
    assert forbidden_imports(files, is_impure) == []


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("time", True),
        ("ray.util", True),
        ("asyncio", True),
        ("engines.gang.gang_config", True),
        ("engines.gang.eta.measured_times", True),
        ("engines.gang.policies.fair:Fair", False),
        ("engines.core.spec", False),
        ("math", False),
    ],
)
def test_an_impure_import_is_found(module: str, found: bool) -> None:
    assert is_impure("engines/gang/policies/fair.py", module) is found


def private_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield imports and attributes of the libraries in ``PRIVATE`` with a part that begins with an underscore."""
    nodes = list(nodes)
    named = [(node.lineno, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    named += [(node.lineno, f"{node.module}.{alias.name}") for node in imports for alias in node.names]
    named += [(node.lineno, ast.unparse(node)) for node in nodes if isinstance(node, ast.Attribute)]
    for line, name in named:
        library, *parts = name.split(".") if re.fullmatch(r"[\w.]+", name) else ("",)
        if library in PRIVATE and any(re.match(r"_(?!_)", part) for part in parts):
            yield line, name


def test_private_names_of_libraries_have_one_file() -> None:
    offenders = [
        f"{name}:{line} uses {private}"
        for name in python_files(*PACKAGES)
        for line, private in private_names(nodes_of(name))
        if name != PRIVATE[private.split(".")[0]]
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from ray._private import worker", True),
        ("from ray.serve.context import _get_global_client", True),
        ("import torch.distributed._symmetric_memory as symmetric", True),
        ("torch._scaled_mm(x)", True),
        ("torch.ops.aten._scaled_dot_product_cudnn_attention(q)", True),
        ("torch.__version__", False),
        ("torch.mm(self._x).T", False),
        ("from torch.distributed import TCPStore", False),
    ],
)
def test_a_private_name_is_found(code: str, found: bool) -> None:
    assert any(private_names(ast.walk(ast.parse(code)))) is found


def test_specs_of_families_are_read_without_torch() -> None:
    specs = [name.removesuffix(".py").replace("/", ".") for name in python_files("pipelines/models") if "/spec" in name]
    assert len(specs) > 15
    code = f"import sys, {', '.join(specs)}; print({{'torch', 'diffusers'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


WITH_TORCH = {"accelerate", "diffusers", "peft", "torch"}


def imported_at_once(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules that a file imports at once: not inside functions, nor for types alone."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                yield from imported_at_once(ast.iter_child_nodes(node))


@cache
def next_modules(module: str) -> frozenset[str]:
    """Return the modules that the file of ``module`` imports at once; none for a foreign module."""
    path = ROOT / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return frozenset(name for file in files for name in imported_at_once(tree_of(str(file.relative_to(ROOT))).body))


def reached(module: str) -> set[str]:
    """Return all modules that the import of ``module`` imports, by the files of this repository."""
    seen, waiting = set[str](), {module}
    while waiting:
        seen |= waiting
        waiting = {name for one in waiting for name in next_modules(one)} - seen
    return seen


def test_unit_tests_import_no_torch() -> None:
    """``make test-unit`` refuses it at run time; this finds it in every run. Tests may import it inside."""
    listed = [line for line in (ROOT / "tests/unit.txt").read_text().split() if not line.startswith("-")]
    files = [name for name in python_files("tests") if name.startswith(tuple(listed)) and "/test_" in name]
    assert len(files) > len(listed)
    modules = {name: name.removesuffix(".py").replace("/", ".") for name in files}
    assert {name: found for name, module in modules.items() if (found := WITH_TORCH & reached(module))} == {}


@pytest.mark.parametrize(
    ("module", "levels"),
    [("deployments.stages.denoiser", LEVELS[:1]), ("deployments.stages.rank", LEVELS), ("engines.gang.rank", LEVELS)],
)
def test_forks_have_all_modules_of_ours_that_import_no_ray(module: str, levels: tuple[str, ...]) -> None:
    """Otherwise each start of a gang imports them: name them in ``LIBRARIES``."""
    libraries = ["deployments.zygote", *(library for level in levels for library in LIBRARIES[level])]
    forked = {name for library in libraries for name in reached(library)}
    later = {name for name in reached(module) - forked if top(name) in PACKAGES and next_modules(name)}
    assert later, "some import Ray"
    assert {name for name in later if "ray" not in map(top, reached(name))} == set()


def test_http_is_known_to_deployments_alone() -> None:
    assert (
        forbidden_imports(python_files("engines", "pipelines"), lambda _, module: top(module) in HTTP_LIBRARIES) == []
    )


def registry_table() -> ast.Assign:
    assignments = (node for node in tree_of(REGISTRY).body if isinstance(node, ast.Assign))
    return next(node for node in assignments if ast.unparse(node.targets[0]) == "FAMILY_FOLDERS")


@cache
def families() -> set[str]:
    """Return the words that transformer classes begin with: ``flux``, ``wan``. One letter is no word."""
    classes = ast.literal_eval(registry_table().value)
    firsts = {re.findall(WORD, name)[0].lower() for name in classes}
    return {word for word in firsts if len(word) > 1}


def words(text: str) -> set[str]:
    """Return the words of a text: ``FluxPipeline``, ``load_flux`` and ``flux-shapes`` all contain ``flux``."""
    return {word.lower() for word in re.findall(WORD, text)}


def documentation(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the ids of strings for readers: lone statements, and the ``description=`` of a field."""
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return alone | {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "description"}


def identifiers_and_strings(name: str) -> Names:
    for_readers = documentation(nodes_of(name))
    for node in nodes_of(name):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                yield line, text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield line, text
            case ast.keyword(arg=str(text)) | ast.ImportFrom(module=str(text)):
                yield line, text
            case ast.Constant(value=str(text)) if id(node) not in for_readers:
                yield line, text


def may_name_family(name: str, line: int, family: str) -> bool:
    table = registry_table()
    in_table = name == REGISTRY and table.lineno <= line <= (table.end_lineno or 0)
    return in_table or any(re.match(rf"{folder}{family}\d*(_\w+)?(/\w+)?\.py$", name) for folder in OWN_FILES)


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("pipelines/models/flux/spec.py", True),
        ("pipelines/models/flux2/fast.py", True),
        ("pipelines/models/wan/spec.py", False),
        ("pipelines/models/spec.py", False),
        ("pipelines/models/generic/flux.py", False),
        ("pipelines/blocks/flux.py", False),
        ("engines/fast/flux.py", False),
    ],
)
def test_a_family_may_be_named_in_its_own_files(name: str, may: bool) -> None:
    assert may_name_family(name, 1, "flux") is may


def test_a_family_is_known_in_its_own_files_and_its_registry_line_alone() -> None:
    offenders = [
        f"{name}:{line} says {text!r}"
        for name in python_files(*PACKAGES)
        for line, text in identifiers_and_strings(name)
        for family in families()
        if family in text.lower() and family in words(text) and not may_name_family(name, line, family)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("FluxPipeline", True), ("pipelines.flux", True), ("load_flux2", True), ("influx", False), ("reflux_rate", False)],
)
def test_a_family_name_is_found_as_a_word(text: str, found: bool) -> None:
    assert ("flux" in words(text)) is found


def mentions_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=attr):
            return attr in names
        case ast.ImportFrom(module="os", names=imported):
            return any(alias.name in names for alias in imported)
    return False


def test_one_file_reads_the_environment() -> None:
    offenders = [
        f"{name}:{getattr(node, 'lineno', 0)}"
        for name in python_files(*CODE)
        if name != SETTINGS and name not in SET_VARIABLES_OF_LIBRARIES | START_PROCESSES
        for node in nodes_of(name)
        if mentions_environment(node)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("os.environ['A']", True),
        ("def f(environment=os.environ): ...", True),
        ("from os import getenv", True),
        ("os.path.join", False),
    ],
)
def test_a_mention_of_the_environment_is_found(code: str, found: bool) -> None:
    assert any(map(mentions_environment, ast.walk(ast.parse(code)))) is found
