"""The web page: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from deployments.api.context import ApiContext

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = files("deployments").joinpath("web/index.html").read_text(encoding="utf-8")

    @router.get("/")
    async def read_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    return router
