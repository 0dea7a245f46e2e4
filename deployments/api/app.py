"""The API as one application: routes, errors, limits, documents and the web page around a studio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.context import ApiContext
from deployments.api.documents import add_document
from deployments.api.drain import Drain, Draining
from deployments.api.errors import add_error_handlers
from deployments.api.files import FileShelf
from deployments.api.health import health_routes, model_routes
from deployments.api.images import image_routes
from deployments.api.middleware import BodyLimit, RequestLog
from deployments.api.page import page_routes
from deployments.api.settings import ApiSettings
from deployments.api.streams import ClientGoneError
from deployments.api.videos import video_routes
from deployments.clips.clips import Clips
from deployments.names import own_version
from deployments.studio.interface import Studio

ROUTES = (health_routes, model_routes, image_routes, video_routes, page_routes)
DESCRIPTION = "Text to image and text to video. Works with OpenAI's clients; what goes beyond them is marked so."


def create_api(studio: Studio, settings: ApiSettings, clips: Clips, drain: Drain | None = None) -> FastAPI:
    """Returns the HTTP application. Its lifespan starts ``clips`` and stops them at its end.

    ``drain`` is for who wants to end it with care.
    """
    context = ApiContext(studio=studio, settings=settings, files=file_shelf(settings), clips=clips)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await clips.start()
        try:
            yield
        finally:
            await clips.stop()

    app = FastAPI(
        title="Troupe", version=own_version(), description=DESCRIPTION, lifespan=lifespan, redirect_slashes=False
    )
    for routes in ROUTES:
        app.include_router(routes(context))
    add_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Draining, drain=drain or Drain())
    app.add_middleware(RequestLog, sends_request_id=settings.sends_request_id)
    add_document(app)
    return app


def file_shelf(settings: ApiSettings) -> FileShelf:
    folder = settings.data_dir / "files"
    return FileShelf(folder=folder, lifetime_s=settings.file_lifetime_s, max_bytes=settings.max_files_bytes)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the access log does
