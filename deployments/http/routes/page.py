"""Pages for browsers: one to try the server, two that show the API's document. Nothing is loaded from elsewhere."""

from __future__ import annotations

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
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    f"media-src blob:; connect-src 'self'; {SELF_CONTAINED}"
)
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


def page_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    add_page(router, "/", "index.html", POLICY)
    add_page(router, "/docs", "docs.html", DOCS_POLICY)
    add_page(router, "/redoc", "redoc.html", DOCS_POLICY)

    @router.get("/docs/{name}")
    async def read_asset(name: str) -> RangedFile:
        if name not in ASSETS:
            raise ApiError(404, f"There is no file {shown(name)} here", param="name")
        return RangedFile(
            ASSETS[name] / name, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        )

    return router


def add_page(router: APIRouter, path: str, name: str, policy: str) -> None:
    page = (WEB / name).read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}

    @router.get(path)
    async def read_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)
