"""The API as one application: routes, errors, limits, documents and the web page around a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.asyncio_tools import cancel
from deployments.batches.contents import Contents
from deployments.batches.records import BatchStore
from deployments.batches.runner import BatchRunner
from deployments.clips.clips import Clips
from deployments.clips.objects import Bucket
from deployments.http.admission import Admission, OpenRequests
from deployments.http.body_limit import BodyLimit
from deployments.http.clip_events import ClipPoller
from deployments.http.context import ApiContext
from deployments.http.drain import Drain, Draining
from deployments.http.errors import add_error_handlers
from deployments.http.files import FileShelf, ObjectShelf
from deployments.http.hosts import HostCheck
from deployments.http.idempotency import LEASE_S, KnownRequests
from deployments.http.measures import usage_routes
from deployments.http.middleware import CLIENT_GONE, RequestLog
from deployments.http.openapi_text import add_document
from deployments.http.origins import Cors, OriginCheck
from deployments.http.partial import HeadAsGet, WholeForOld
from deployments.http.routes.batches import InnerRequests, batch_routes
from deployments.http.routes.health import Liveness, health_routes, model_routes
from deployments.http.routes.images import image_routes
from deployments.http.routes.loras import FORM_BYTES, LORAS, lora_routes
from deployments.http.routes.page import page_routes
from deployments.http.routes.videos import video_routes
from deployments.http.settings import ApiSettings
from deployments.http.streams import ClientGoneError
from deployments.lora_store import LoraStore, lora_folder
from deployments.names import own_version
from deployments.requests.prompt_enhancer import PromptEnhancers
from deployments.service.interface import Service
from deployments.usage.accounts import Accounts, KeyLimitGuard
from deployments.usage.ledger import UsageLedger
from pipelines.request import MediaKind

NUM_UNPACKINGS = 2
"""Requests whose pictures are unpacked side by side, beside the event loop."""
UPLOADS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("/v1/images/edits",),
    "video": ("/v1/videos", "/v1/videos/sync", "/v1/videos/edits"),
}
ROUTES = (health_routes, model_routes, lora_routes, usage_routes, batch_routes, image_routes, video_routes, page_routes)
DESCRIPTION = (
    "Text to image and text to video. Works with OpenAI's clients; additions to their API are marked. HEAD is there "
    "wherever GET is. The door before the server refuses what is no request (`bad_request`), and heads that are too "
    "large (431 `head_too_large`) or too slow (408 `request_timeout`). It answers for a server that is not there (503 "
    "`server_unavailable`), died over a request (502 `server_lost`) or never answered (504 `server_timeout`)."
)


def create_api(
    service: Service,
    settings: ApiSettings,
    clips: Clips,
    drain: Drain | None = None,
    accounts: Accounts | None = None,
    enhancers: PromptEnhancers | None = None,
) -> FastAPI:
    """Return the HTTP application. Its lifespan starts ``clips`` and stops them at its end.

    ``drain`` lets the caller end it gracefully. ``service`` charges ``accounts``. ``enhancers`` belong to the models
    whose cards name one.
    """
    accounts = accounts or Accounts(settings.key_limits)
    context = make_context(service, settings, clips, accounts, enhancers or PromptEnhancers())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await clips.start()
        accounts.ledger = UsageLedger(clips.database)
        await context.loras.sweep()
        inner = InnerRequests(app, settings.video_poll_s)
        poll_s, keep_s = settings.video_poll_s, settings.keep_batches_s
        runner = BatchRunner(context.batches, context.contents, inner.send, poll_s, keep_s)
        making = asyncio.create_task(runner.run())
        try:
            yield
        finally:
            await cancel(making)
            await accounts.ledger.flush()
            await clips.stop()
            await context.enhancers.close()
            context.unpacking.shutdown(wait=False)

    app = FastAPI(
        title="Troupe",
        version=own_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    for routes in ROUTES:
        app.router.routes += routes(context).routes  # `include_router` makes each route twice, and matches it twice
    add_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    add_guards(app, settings, service, drain or Drain())
    add_document(app)
    return app


def make_context(
    service: Service, settings: ApiSettings, clips: Clips, accounts: Accounts, enhancers: PromptEnhancers
) -> ApiContext:
    """Return the context of all routes."""
    return ApiContext(
        service=service,
        settings=settings,
        files=file_shelf(settings, clips.bucket),
        clips=clips,
        admission=Admission(settings),
        poller=ClipPoller(clips, settings.video_poll_s),
        unpacking=ThreadPoolExecutor(NUM_UNPACKINGS, "unpacking"),
        accounts=accounts,
        key_limits=KeyLimitGuard(accounts, clips),
        known=KnownRequests(clips.database),
        enhancers=enhancers,
        batches=BatchStore(database=clips.database, lease_s=LEASE_S),
        contents=Contents(root=settings.data_dir / "batches", bucket=clips.bucket),
        loras=LoraStore(database=clips.database, root=lora_folder(settings.data_dir)),
    )


def add_guards(app: FastAPI, settings: ApiSettings, service: Service, drain: Drain) -> None:
    """Wrap the routes in the middleware of all requests, from the inside out."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(HostCheck, settings=settings)
    app.add_middleware(OpenRequests, limit=settings.max_open_requests)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        deadline_s=settings.body_deadline_s,
        uploads={
            **dict.fromkeys(["/v1/files", *uploads(service)], settings.max_upload_bytes),
            LORAS: max(settings.max_body_bytes, settings.max_lora_bytes + FORM_BYTES),
        },
    )
    app.add_middleware(Draining, drain=drain)
    if settings.allowed_origins:
        app.add_middleware(Cors, allowed_origins=settings.allowed_origins)  # around refusals of all the others
    app.add_middleware(WholeForOld)
    app.add_middleware(RequestLog, sends_request_id=settings.sends_request_id)
    app.add_middleware(Liveness, drain=drain)


def uploads(service: Service) -> list[str]:
    """Return the routes that accept pictures or clips: those whose models take some."""
    made = [card.defaults.of(kind) for card in service.cards().values() for kind in card.defaults.kinds]
    return [
        path
        for kind in {one.kind for one in made if one.max_pictures or one.max_video_frames or one.takes_control}
        for path in UPLOADS[kind]
    ]


def file_shelf(settings: ApiSettings, bucket: Bucket | None) -> FileShelf | ObjectShelf:
    lifetime_s, max_bytes = settings.file_lifetime_s, settings.max_files_bytes
    if bucket is None:
        return FileShelf(folder=settings.data_dir / "files", lifetime_s=lifetime_s, max_bytes=max_bytes)
    return ObjectShelf(bucket=bucket, lifetime_s=lifetime_s, max_bytes=max_bytes, signs=settings.signed_urls)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # read by the access log alone
