"""Hooks of mkdocs.yml: README.md is the site's first page, and what documents link to outside docs/ is on the site.

Links are written for the repository. Each is replaced by one to the page or file that has its target on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
HOME, DOCS, SOURCE = "README.md", "docs/", "source/"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
LISTED = (".md", ".yaml", ".jsonl", ".ipynb")
"""Endings of the files that the page of a folder lists."""


def uri_of(path: str) -> str:
    """Return the place on the site, before rendering, of a file or folder of the repository."""
    if path == HOME:
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{SOURCE}{path}/index.md"
    return path.removeprefix(DOCS) if path.startswith(DOCS) else f"{SOURCE}{path}"


def path_of(uri: str) -> str:
    """Return the file or folder of the repository at a place of the site."""
    if uri == "index.md":
        return HOME
    if not uri.startswith(SOURCE):
        return f"{DOCS}{uri}"
    path = uri.removeprefix(SOURCE)
    return path if (ROOT / path).is_file() else posixpath.dirname(path)


def targets(path: str) -> list[str]:
    """Return the files and folders of the repository that the document at ``path`` links to."""
    folder = posixpath.dirname(path)
    return [posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(text_of(path))]


def text_of(path: str) -> str:
    """Return the Markdown of a document, or a list of the files in a folder."""
    place = ROOT / path
    if not place.is_dir():
        return place.read_text()
    names = sorted(file.name for file in place.iterdir() if file.suffix in LISTED)
    return "\n".join((f"# {path}", "", *(f"- [{name}]({posixpath.basename(path)}/{name})" for name in names), ""))


def rewritten(markdown: str, path: str) -> str:
    """Return the ``markdown`` of the document at ``path`` with links for the site. Links to missing files stay."""
    folder, here = posixpath.dirname(path), posixpath.dirname(uri_of(path))

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return posixpath.relpath(uri_of(target), here) if (ROOT / target).exists() else match[1]

    return LINK.sub(replace, markdown)


def linked(paths: list[str]) -> list[str]:
    """Return ``paths`` and all that they link to, directly or not, each once."""
    found, queue = dict.fromkeys(paths), list(paths)
    while queue:
        path = queue.pop()
        if path.endswith(".md") or (ROOT / path).is_dir():
            fresh = [target for target in targets(path) if target not in found and (ROOT / target).exists()]
            found |= dict.fromkeys(fresh)
            queue += fresh
    return list(found)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and what documents link to outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    documents = [path_of(file.src_uri) for file in files.documentation_pages()]
    for path in linked([HOME, *documents]):
        if path.startswith(DOCS):
            continue
        level = InclusionLevel.INCLUDED if path == HOME else InclusionLevel.NOT_IN_NAV
        source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
        if (ROOT / path).is_dir():
            source = {"content": text_of(path)}
        files.append(File.generated(config, uri_of(path), inclusion=level, **source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links of a page."""
    return rewritten(markdown, path_of(page.file.src_uri))
