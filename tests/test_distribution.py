"""The wheel has its name, requirements and content, and hints name extras that it has."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deployments.cli.preflight import EXTRAS
from deployments.names import DISTRIBUTION, own_version
from tests.layout.support.source import PACKAGES, ROOT, repository_files

NAME = "troupe-serve"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
NEEDED = (*(f"{package}/" for package in PACKAGES), "pyproject.toml", "README.md", "LICENSE")
PINNED = ("torch", "diffusers", "ray")
TYPES = (".py", ".yaml", ".html", ".css", ".js", ".safetensors", ".json")
MODULES = {"tensorrt_rtx_bindings": "tensorrt-rtx-cu13-bindings", "c2pa": "c2pa-python"}
"""Modules whose package has another name."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the repository's own files, away from the work tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in repository_files():
        if name.startswith(NEEDED):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name, follow_symlinks=False)  # as in a clone
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if not line.startswith("#"))
    return {name: Version(version) for name, _, version in pins}


def test_its_name_is_ours(wheel: Path, metadata: Message) -> None:
    assert (metadata["Name"], DISTRIBUTION) == (NAME, NAME)
    assert wheel.name.startswith("troupe_serve-")
    with ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "troupe = deployments.cli.main:main" in archive.read(entry_points).decode()


def test_it_holds_what_is_served_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    served = {name for name in repository_files() if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    assert {name for name in served if name.endswith(TYPES)} <= files
    assert files <= served


def test_it_holds_weights_where_the_repository_links_to_them(wheel: Path) -> None:
    links = [name for name in repository_files() if (ROOT / name).is_symlink() and name.startswith("pipelines/")]
    assert links
    with ZipFile(wheel) as archive:
        assert all(archive.read(name) == (ROOT / name).read_bytes() for name in links)


def test_it_asks_for_what_the_tests_pass_with(metadata: Message) -> None:
    pins = constraints()
    tested = [wanted for wanted in requirements(metadata) if canonicalize_name(wanted.name) in pins]
    assert len(tested) > 20
    assert [str(wanted) for wanted in tested if pins[canonicalize_name(wanted.name)] not in wanted.specifier] == []


@pytest.mark.parametrize("name", PINNED)
def test_no_other_minor_release_is_let_in(metadata: Message, name: str) -> None:
    (wanted,) = (one for one in requirements(metadata) if one.name == name and one.marker is None)
    tested = constraints()[name]
    assert f"{tested.major}.{tested.minor}.99" in wanted.specifier
    for other in (f"{tested.major}.{tested.minor + 1}.0", f"{tested.major}.{tested.minor - 1}.0"):
        assert other not in wanted.specifier


def test_every_hint_installs_a_clone_with_an_extra_that_it_has(metadata: Message) -> None:
    """The package is on no index."""
    texts = [name for name in repository_files() if name.endswith((".py", ".md", ".toml", ".yaml", "Makefile"))]
    written = {file: (ROOT / file).read_text() for file in texts}
    by_path = [
        (file, extra)
        for file, text in written.items()
        for extras in re.findall(r"install[^\n`]* '?\.\[([a-z0-9,]+)\]", text)
        for extra in extras.split(",")
    ]
    assert len(by_path) > 10
    assert [hint for hint in by_path if hint[1] not in metadata.get_all("Provides-Extra", [])] == []
    assert [file for file, text in written.items() if re.search(rf"install[^\n`]*(?<![\w.-]){NAME}\[", text)] == []


def test_each_module_is_installed_by_the_extra_that_is_told_for_it() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        installed = {canonicalize_name(Requirement(text).name) for text in optional[extra]}
        assert {canonicalize_name(MODULES.get(module, module)) for module in modules} <= installed, extra


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        return "7.8.9"

    monkeypatch.setattr("deployments.names.version", version)
    assert (own_version(), asked) == ("7.8.9", [NAME])
