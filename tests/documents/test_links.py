"""Links between documents hold in the repository and on the site."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.support.fenced import FENCE, ROOT

DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", *DOCS)
REPORTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks" / "reports").glob("*.md"))
PROGRAM = re.compile(r"-m ((?:benchmarks|deployments|training)\.[\w.]+)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MKDOCS = shutil.which("mkdocs", path=f"{os.environ['PATH']}:{ROOT}/.venv/site/bin")


@pytest.fixture(scope="module")
def hooks() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        yield importlib.import_module("site_hooks")


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub, and the site, give the headings of ``document``."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    here = ROOT / document
    for target, anchor in LINK.findall(here.read_text()):
        there = here.parent / target if target else here
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("document", [*DOCUMENTS, *REPORTS])
def test_programs_exist_or_are_said_to_be_gone(document: str) -> None:
    text = (ROOT / document).read_text()
    for module in {name.rstrip(".") for name in PROGRAM.findall(text)}:
        file = ROOT / module.replace(".", "/")
        is_gone = re.search(rf"`({module}|{module.rpartition('.')[0]})` (is now|has been removed)", text)
        assert is_gone or file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


def test_headings_have_the_anchors_of_github() -> None:
    assert "pictures-post-v1imagesgenerations" in anchors(ROOT / "docs" / "use" / "pictures.md")
    assert "make-serve" not in anchors(ROOT / "docs" / "operate" / "one_host.md")


def test_every_document_is_on_the_site() -> None:
    def pages(entries: object) -> Iterator[str]:
        match entries:
            case str():
                yield entries
            case list():
                for entry in entries:
                    yield from pages(entry)
            case dict():
                for entry in entries.values():
                    yield from pages(entry)

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(settings["nav"])) == sorted(["index.md", *(name.removeprefix("docs/") for name in DOCS)])
    assert settings["strict"] is True


@pytest.mark.parametrize(
    ("document", "link", "on_the_site"),
    [
        ("README.md", "docs/use/api.md", "use/api.md"),
        ("README.md", "deployments/configs", "source/deployments/configs/index.md"),
        ("docs/use/api.md", "errors.md#errors", "errors.md#errors"),
        ("docs/operate/files.md", "../../troupe.service", "../source/troupe.service"),
        ("docs/operate/files.md", "../../README.md", "../index.md"),
        ("CONTRIBUTING.md", "docs/inside/architecture.md", "../inside/architecture.md"),
        ("README.md", "https://docs.ray.io", "https://docs.ray.io"),
    ],
)
def test_links_of_the_site(hooks: ModuleType, document: str, link: str, on_the_site: str) -> None:
    assert hooks.rewritten(f"see [it]({link}).", document) == f"see [it]({on_the_site})."


def test_what_documents_link_to_is_on_the_site(hooks: ModuleType) -> None:
    paths = hooks.linked(["README.md", *DOCS])
    assert {"troupe.service", "deployments/configs", "benchmarks/reports/peers_h200_2026-11-23.md"} <= set(paths)
    assert [path for path in paths if hooks.path_of(hooks.uri_of(path)) != path] == []


@pytest.mark.slow
@pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed (make site)")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    for page in ("index.html", "operate/nginx.html", "source/benchmarks/reports/index.html"):
        assert (tmp_path / page).is_file()
