"""Pages for browsers: one to try the server, two that show the API's document. Nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from deployments.http.context import ApiContext
from deployments.http.errors import ApiError
from deployments.http.partial import RangedFile
from deployments.requests.request_errors import shown

SELF_CONTAINED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src data: blob:; "
    f"media-src blob:; connect-src 'self'; {SELF_CONTAINED}"
)
"""``{scripts}``: the hash of each script that stands in the page itself."""
DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    f"connect-src 'self'; worker-src blob:; {SELF_CONTAINED}"
)
"""Swagger UI and ReDoc write styles into the page; ReDoc searches in a worker that it makes from a blob."""

WEB = Path(str(files("deployments"))) / "web"
BUNDLED = Path(str(files("fastapi_offline"))) / "static"
ASSETS = {"docs.js": WEB} | dict.fromkeys(
    ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png"), BUNDLED
)
"""Files of the pages about the API, and the folder of each."""
PAGE_ASSETS = dict.fromkeys((file.name for file in (WEB / "page").iterdir()), WEB / "page")
"""Scripts and style of the page to try the server."""
INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def page_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    add_page(router, "/", "index.html", POLICY)
    add_page(router, "/docs", "docs.html", DOCS_POLICY)
    add_page(router, "/redoc", "redoc.html", DOCS_POLICY)

    @router.get("/docs/{name}")
    async def read_docs_asset(name: str) -> RangedFile:
        return read_asset(ASSETS, name)

    @router.get("/page/{name}")
    async def read_page_asset(name: str) -> RangedFile:
        return read_asset(PAGE_ASSETS, name)

    return router


def read_asset(folders: Mapping[str, Path], name: str) -> RangedFile:
    """Return the file ``name`` of its folder. ApiError 404 if it is not among ``folders``."""
    if name not in folders:
        raise ApiError(404, f"There is no file {shown(name)} here", param="name")
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return RangedFile(folders[name] / name, headers=headers)


def add_page(router: APIRouter, path: str, name: str, policy: str) -> None:
    page = (WEB / name).read_text(encoding="utf-8")
    hashes = (hashlib.sha256(script.encode()).digest() for script in INLINE.findall(page))
    scripts = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)
    headers = {"Content-Security-Policy": policy.replace("{scripts}", scripts), "X-Content-Type-Options": "nosniff"}

    @router.get(path)
    async def read_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)
