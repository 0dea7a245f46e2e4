"""The shape of the repository: which way imports go, who may know what, and how large things may grow."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engines", "pipelines", "deployments")
MAY_IMPORT = {"engines": {"engines"}, "pipelines": {"engines", "pipelines"}, "deployments": set(PACKAGES)}
HTTP_LIBRARIES = {"aiohttp", "fastapi", "flask", "httpx", "openai", "requests", "starlette", "uvicorn"}
REGISTRY = "pipelines/registry.py"
SETTINGS = "deployments/settings.py"
TRAINING = "pipelines/training/"
CHECKPOINTS = "pipelines/checkpoints/"

MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 40
MAX_CHECKPOINT_BYTES = 28_000_000
MAX_REPOSITORY_BYTES = 34_000_000

Names = Iterator[tuple[int, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def repository_files() -> tuple[str, ...]:
    """Tracked files and new ones that git does not ignore, without those deleted in the work tree."""
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


def modules_named(tree: ast.Module) -> Names:
    """Every absolute module that is imported, or named in a string that looks like a module of this project."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Constant(value=str(text)) if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+(:\w+)?", text):
                yield node.lineno, text


def top(module: str) -> str:
    return module.split(".")[0]


def forbidden_imports(names: list[str], forbidden: Callable[[str, str], bool]) -> list[str]:
    """``forbidden`` gets the file and the module."""
    return [
        f"{name}:{line} names {module}"
        for name in names
        for line, module in modules_named(tree_of(name))
        if forbidden(name, module)
    ]


def test_imports_go_from_deployments_to_pipelines_to_engines() -> None:
    def upward(name: str, module: str) -> bool:
        return top(module) in PACKAGES and top(module) not in MAY_IMPORT[name.split("/")[0]]

    assert forbidden_imports(python_files(*PACKAGES), upward) == []


def test_imports_are_absolute() -> None:
    nodes = [(name, node) for name in python_files(*PACKAGES) for node in ast.walk(tree_of(name))]
    assert [f"{name}:{node.lineno}" for name, node in nodes if isinstance(node, ast.ImportFrom) and node.level] == []


def test_nothing_that_is_served_imports_training_tests_or_benchmarks() -> None:
    served = [name for name in python_files(*PACKAGES) if not name.startswith(TRAINING)]

    def for_developers(_: str, module: str) -> bool:
        return top(module) in {"tests", "benchmarks"} or module.startswith("pipelines.training")

    assert forbidden_imports(served, for_developers) == []


def test_ray_is_known_to_deployments_and_gangs_alone() -> None:
    others = [name for name in python_files("engines", "pipelines") if not name.startswith("engines/gang/")]
    assert forbidden_imports(others, lambda _, module: top(module) == "ray") == []


def test_http_is_known_to_deployments_alone() -> None:
    assert (
        forbidden_imports(python_files("engines", "pipelines"), lambda _, module: top(module) in HTTP_LIBRARIES) == []
    )


def registry_table() -> ast.Assign:
    assignments = (node for node in tree_of(REGISTRY).body if isinstance(node, ast.Assign))
    return next(node for node in assignments if ast.unparse(node.targets[0]) == "FAMILIES")


def families() -> dict[str, str]:
    """Family folders that the registry names, and the word that each may be known by: ``cosmos3`` is ``cosmos``."""
    folders = {package.replace(".", "/") + "/" for package in ast.literal_eval(registry_table().value).values()}
    return {folder: re.sub(r"\d+$", "", folder.split("/")[-2]) for folder in folders}


def words(text: str) -> set[str]:
    """``FluxPipeline``, ``load_flux`` and ``flux-shapes`` all contain the word ``flux``."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}


def documentation(tree: ast.Module) -> set[int]:
    """Ids of strings for readers: those that stand alone as statements, and the ``description=`` of a field."""
    nodes = list(ast.walk(tree))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return alone | {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "description"}


def identifiers_and_strings(tree: ast.Module) -> Names:
    for_readers = documentation(tree)
    for node in ast.walk(tree):
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


def may_name_family(name: str, line: int, folder: str) -> bool:
    table = registry_table()
    in_table = name == REGISTRY and table.lineno <= line <= (table.end_lineno or 0)
    return in_table or name.startswith((folder, TRAINING))


def test_a_family_is_known_in_its_folder_and_its_registry_line_alone() -> None:
    offenders = [
        f"{name}:{line} says {text!r}"
        for name in python_files(*PACKAGES)
        for line, text in identifiers_and_strings(tree_of(name))
        for folder, family in families().items()
        if family in words(text) and not may_name_family(name, line, folder)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("FluxPipeline", True), ("pipelines.flux", True), ("load_flux2", True), ("influx", False), ("reflux_rate", False)],
)
def test_a_family_name_is_found_as_a_word(text: str, found: bool) -> None:
    assert ("flux" in words(text)) is found


def reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="getenv"):
            return True
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in {"environ", "getenv"} for alias in names)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), attr="get"):
            return True
        case ast.Subscript(ctx=ast.Load()) | ast.Compare():
            operand = node.value if isinstance(node, ast.Subscript) else node.comparators[0]
            return ast.unparse(operand) == "os.environ"
    return False


def test_one_file_reads_the_environment() -> None:
    offenders = [
        f"{name}:{getattr(node, 'lineno', 0)}"
        for name in python_files(*PACKAGES)
        if name != SETTINGS and not name.startswith(TRAINING)
        for node in ast.walk(tree_of(name))
        if reads_environment(node)
    ]
    assert offenders == []


def test_files_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in repository_files() if name[-3:] == ".py"}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def length(function: Function) -> int:
    """Lines from ``def`` to the end, without the docstring and without functions inside, which count by themselves."""
    inside = [node for node in ast.walk(function) if isinstance(node, Function) and node is not function]
    apart = [function.body[0]] if ast.get_docstring(function) else []
    skipped = {line for node in apart + inside for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(set(range(function.lineno, (function.end_lineno or 0) + 1)) - skipped)


def test_functions_are_short() -> None:
    offenders = [
        f"{name}:{function.lineno} {function.name} has {length(function)} lines"
        for name in repository_files()
        if name.endswith(".py")
        for function in ast.walk(tree_of(name))
        if isinstance(function, Function) and length(function) > MAX_FUNCTION_LINES
    ]
    assert offenders == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {Path(name).parent for name in python_files(*PACKAGES)}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_tests_mirror_the_tree() -> None:
    """A folder of tests is called as a package, or as a module whose tests share a set-up."""
    folders = {Path(name).parent.relative_to("tests") for name in python_files(*(f"tests/{name}" for name in PACKAGES))}
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
    return sum(os.path.getsize(ROOT / name) for name in repository_files() if name.startswith(prefix))


def test_checkpoints_and_repository_stay_small() -> None:
    assert total_bytes(CHECKPOINTS) <= MAX_CHECKPOINT_BYTES
    assert total_bytes("") < MAX_REPOSITORY_BYTES
