"""/v1/videos: clips, their bytes, and their progress as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from deployments.asyncio_tools import to_the_end
from deployments.clips.clips import Clips
from deployments.clips.database import FILE_GONE, ClipRecord
from deployments.clips.objects import StoredObject
from deployments.clips.storage import CONTENT_TYPES, Variant
from deployments.clips.webhooks import Webhook
from deployments.http.answers import Video, VideoDeleted, VideoPage
from deployments.http.body import FORMS, JSON
from deployments.http.clip_events import video_events
from deployments.http.context import ApiContext
from deployments.http.errors import GPU_HEADER, ApiError, from_failure, retry_after
from deployments.http.idempotency import IdempotencyKey
from deployments.http.lookups import clip_id_of, find_clip, no_video
from deployments.http.measures import enhancer_header, eta_header, gpu_header, measures
from deployments.http.openapi_text import (
    MAKING,
    body_document,
    error_documents,
    file_answers,
    stream_answers,
    sync_answers,
    video_answers,
)
from deployments.http.partial import RangedFile, is_head, ranged
from deployments.http.streams import STREAM_HEADERS, ClientGoneError, start_stream, until_disconnect
from deployments.http.uploads import as_it_is, read_upload
from deployments.requests.bodies import ContentQuery, PageQuery, VideoBody
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import NUM_PREVIEWS, Requester, RequestRules
from deployments.requests.size_choice import clip_seconds
from deployments.service.interface import ModelCard

STATUS_OF_FAILURES = {"invalid_value": 400, "too_late": 429, "gang_broken": 502, "storage_full": 507}
POLL_MS = 500
"""Recommended interval of polling clients."""


def video_routes(context: ApiContext) -> APIRouter:
    authorized = Depends(context.authorize)
    router = APIRouter(tags=["videos"], dependencies=[authorized])

    @router.post(
        "/v1/videos",
        responses=video_answers() | error_documents(*MAKING, has_work=True),
        openapi_extra=body_document(VideoBody, JSON, *FORMS),
    )
    async def create_video(
        request: Request, response: Response, requester: Requester = authorized, idempotency_key: IdempotencyKey = None
    ) -> Video:
        """Queue a clip. Its record is on disk before the answer, and survives a restart.

        One with ``deadline_s`` begins at once, or is refused.
        """
        clip = await submit_clip(context, request, requester, idempotency_key)
        return video_answer(clip, response)

    @router.post(
        "/v1/videos/sync",
        response_class=FileResponse,
        responses=sync_answers() | error_documents(*MAKING, has_work=True),
        openapi_extra=body_document(VideoBody, JSON, *FORMS),
    )
    async def create_video_sync(
        request: Request, requester: Requester = authorized, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Make a clip and return its MP4. Closing the connection deletes the clip. Beyond OpenAI."""
        clip = await submit_clip(context, request, requester, idempotency_key, is_awaited=True)
        try:
            end = await until_disconnect(request.receive, wait_for_end(context, requester, clip.id))
        except (ClientGoneError, asyncio.CancelledError):
            await to_the_end(context.clips.delete(clip.id))
            raise
        assert end.timings is not None
        path = await context.clips.file(clip.id, "video")
        if path is None:
            raise await not_there(context.clips, end, "video")
        measured = measures([end.timings], clip.request.cache) | enhancer_header(clip.request)
        return clip_file(path, clip.id, "video", measured | {"X-Troupe-Video-Id": clip.id})

    _add_remix_routes(router, context)

    @router.get("/v1/videos", responses=error_documents(400, 401, 404, 503))
    async def list_videos(query: Annotated[PageQuery, Query()], requester: Requester = authorized) -> VideoPage:
        """List clips, the newest first unless order is asc."""
        last = None if query.after is None else await find_clip(context, requester, query.after, "after")
        key_hash, ascending = context.viewer(requester), query.order == "asc"
        page = await context.clips.page(after=last, limit=query.limit, ascending=ascending, key_hash=key_hash)
        return VideoPage.of(*page)

    @router.get("/v1/videos/{video_id}", responses=video_answers() | error_documents(401, 404, 503))
    async def read_video(video_id: str, response: Response, requester: Requester = authorized) -> Video:
        """Return one clip: its status, its progress, or why it failed."""
        clip = await find_clip(context, requester, video_id)
        return video_answer(clip, response)

    @router.delete("/v1/videos/{video_id}", responses=error_documents(401, 403, 404, 503))
    async def delete_video(video_id: str, requester: Requester = authorized) -> VideoDeleted:
        """Delete a clip with its files; stop it if it is still being made."""
        await find_clip(context, requester, video_id)
        if not await context.clips.delete(video_id):
            raise no_video(video_id, "video_id")
        return VideoDeleted(id=video_id)

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=FileResponse,
        responses=file_answers(*CONTENT_TYPES.values(), headers=(GPU_HEADER,))
        | error_documents(400, 401, 404, 409, 410, 416, 503, has_work=True),
    )
    async def read_content(
        video_id: str,
        query: Annotated[ContentQuery, Query()],
        requester: Requester = authorized,
        range_header: Annotated[str | None, Header(alias="Range", examples=["bytes=0-1023"])] = None,
    ) -> Response:
        """Return the clip as MP4 (H.264), a still of it as WebP, or a preview as PNG. One byte range is honoured."""
        clip, variant = await find_clip(context, requester, video_id), query.variant
        may_be_there = variant == "preview" or clip.status == "completed"
        path = await context.clips.file(video_id, variant) if may_be_there else None
        if path is None:
            raise await not_there(context.clips, clip, variant)
        if context.settings.signed_urls and isinstance(path, StoredObject):
            lifetime_s, content_type = context.settings.file_lifetime_s, CONTENT_TYPES[variant]
            url = await asyncio.to_thread(path.bucket.sign, path.name, lifetime_s, content_type)
            return RedirectResponse(url, 307, {"Cache-Control": "no-store", **gpu_header(clip.gpu_s)})
        return clip_file(path, video_id, variant, gpu_header(clip.gpu_s))

    @router.get("/v1/videos/{video_id}/events", responses=stream_answers() | error_documents(401, 404, 429, 503))
    async def read_events(video_id: str, request: Request, requester: Requester = authorized) -> Response:
        """Stream events of a clip until it ends. Beyond OpenAI."""
        clip = await find_clip(context, requester, video_id)
        if is_head(request):
            return EventSourceResponse((), headers=STREAM_HEADERS)
        events = video_events(context.poller, clip, context.admission.watcher())
        return await start_stream(events, request.receive, context.settings)

    return router


def _add_remix_routes(router: APIRouter, context: ApiContext) -> None:
    authorized = Depends(context.authorize)
    document: dict[str, Any] = {
        "responses": video_answers() | error_documents(*MAKING, has_work=True),
        "openapi_extra": body_document(VideoBody, JSON, *FORMS),
    }

    @router.post("/v1/videos/edits", **document)
    async def edit_video(
        request: Request, response: Response, requester: Requester = authorized, idempotency_key: IdempotencyKey = None
    ) -> Video:
        """Queue a clip that is made from the input clip ``video``."""
        clip = await submit_clip(context, request, requester, idempotency_key, adapt=with_video)
        return video_answer(clip, response)

    @router.post("/v1/videos/{video_id}/remix", **document)
    async def remix_video(
        video_id: str,
        request: Request,
        response: Response,
        requester: Requester = authorized,
        idempotency_key: IdempotencyKey = None,
    ) -> Video:
        """Queue a clip that is made from the completed clip in the path, by the same model if that takes clips."""
        source = await find_clip(context, requester, video_id)
        adapt = partial(as_remix, source=source, cards=context.service.cards())
        clip = await submit_clip(context, request, requester, idempotency_key, adapt=adapt)
        return video_answer(clip, response)


def with_video(body: VideoBody) -> VideoBody:
    """Return ``body``. RequestError without an input clip."""
    if not body.sources.videos:
        raise RequestError("video is required: the clip to change", "video", code="missing_field")
    return body


def as_remix(body: VideoBody, source: ClipRecord, cards: Mapping[str, ModelCard]) -> VideoBody:
    """Return ``body`` with the clip ``source``, for its model unless another is named or it takes no clip as asked.

    RequestError if it has an input clip or picture as well.
    """
    for name in ("video", "reference_video", "input_reference"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} has no effect here: the path names the input clip; leave it out", name)
    model = source.request.model
    limits = cards[model].defaults if model in cards else None
    has_lora = bool(body.lora or body.recipe)
    takes_clips = limits is not None and limits.max_video_frames > 0 and (has_lora or not limits.video_needs_lora)
    return body.model_copy(update={"video": (source.id,), "model": body.model or (model if takes_clips else None)})


async def submit_clip(
    context: ApiContext,
    request: Request,
    requester: Requester,
    idempotency_key: str | None,
    *,
    is_awaited: bool = False,
    adapt: Callable[[VideoBody], VideoBody] = as_it_is,
) -> ClipRecord:
    """Return the record of the clip that the body asks for, or of the earlier clip of the same request.

    ``adapt`` checks or changes the body before its model is chosen. ApiError 503 if the frames of other clips that came
    along take all the memory that there is for them.
    """
    resolved = await read_upload(context, request, requester, VideoBody, "video", adapt)
    clips = (*resolved.pictures.videos, resolved.pictures.video_mask)
    parts = (*clips, *(clip.sound for clip in clips if clip is not None))
    num_bytes = sum(len(part.data) for part in parts if part is not None)
    async with AsyncExitStack() as stack:
        stack.enter_context(context.admission.memory.taken())(num_bytes)
        turn = await stack.enter_async_context(
            context.known.turn(request.url.path, requester, idempotency_key, resolved.body)
        )
        clip = None if turn.answer is None else await context.clips.get(turn.answer.decode())
        if clip is None:
            rules = RequestRules(resolved.card)
            asked = rules.check(resolved.body, resolved.pictures, requester, NUM_PREVIEWS)
            asked = replace(asked, source_clip_id=clip_id_of(resolved.body.sources.video))
            await context.check_ready(asked.model)
            asked = await context.enhanced(request, asked)
            arguments = (asked, clip_seconds(asked), asked.key, resolved.pictures)
            webhook = webhook_of(context, resolved.body, requester)
            if is_awaited or asked.deadline_s is not None:
                clip = await begin_clip(context, request, requester, partial(context.clips.begin, *arguments, webhook))
            else:
                async with context.key_limits.clip(asked.key):
                    clip = await context.clips.submit(*arguments, webhook)
            await context.known.keep(turn, clip.id.encode())
        return clip


def webhook_of(context: ApiContext, body: VideoBody, requester: Requester) -> Webhook | None:
    """Return the webhook for the clip's end. RequestError if no message may go there."""
    own = None if body.webhook is None else Webhook(url=body.webhook.url, secret=body.webhook.secret)
    try:
        return context.clips.webhook_for(own, requester.key)
    except ValueError as error:
        raise RequestError(f"webhook cannot be used: {error}", "webhook") from None


async def begin_clip(
    context: ApiContext,
    request: Request,
    requester: Requester,
    begin: Callable[[], Awaitable[tuple[str, asyncio.Future[None]]]],
) -> ClipRecord:
    """Return the record of a clip that a gang has taken. If none does, or the client leaves, there is no clip."""
    clip_id = ""
    try:
        async with context.key_limits.clip(requester.key):
            clip_id, admission = await begin()
        await until_disconnect(request.receive, asyncio.wait_for(admission, None))
        return await find_clip(context, requester, clip_id)
    except BaseException as failure:
        if clip_id:
            await to_the_end(context.clips.delete(clip_id))
        answer = from_failure(failure) if isinstance(failure, Exception) else None
        if answer is None:
            raise
        raise answer from failure


def video_answer(clip: ClipRecord, response: Response) -> Video:
    """Return the answer about a clip, whose headers are those of ``response``."""
    measured = {**eta_header([clip.eta_s]), **gpu_header(clip.gpu_s), **enhancer_header(clip.request)}
    response.headers.update({"openai-poll-after-ms": str(POLL_MS), **measured})
    return Video.of(clip)


async def wait_for_end(context: ApiContext, requester: Requester, video_id: str) -> ClipRecord:
    """Return the clip once it is completed. ApiError if it failed or was deleted."""
    async for event in video_events(context.poller, await context.clips.get(video_id)):
        if event.type == "video.deleted":
            break
    clip = await find_clip(context, requester, video_id)
    if clip.error is not None:
        status = STATUS_OF_FAILURES.get(clip.error.code, 500)
        retry_s = clip.error.retry_after_s
        headers = {"x-should-retry": "false"} if retry_s is None else retry_after(retry_s)
        headers |= gpu_header(clip.gpu_s)
        raise ApiError(status, f"The clip failed: {clip.error.message}", code=clip.error.code, headers=headers)
    return clip


def clip_file(file: Path | StoredObject, video_id: str, variant: Variant, headers: Mapping[str, str]) -> RangedFile:
    return ranged(
        file,
        media_type=CONTENT_TYPES[variant],
        filename=f"{video_id}{file.suffix}",
        content_disposition_type="inline",
        headers={"Cache-Control": "private, no-cache", **headers},
    )


async def not_there(clips: Clips, clip: ClipRecord, variant: Variant) -> ApiError:
    """Return the answer without a file. A completed clip whose file is gone counts as failed."""
    if clip.status == "completed" and variant == "video":
        clip = await clips.note_lost(clip.id) or clip
    headers = {"x-should-retry": "false"}
    if clip.error is not None and clip.error.code == FILE_GONE:
        return ApiError(410, clip.error.message, param="video_id", code="video_gone", headers=headers)
    if clip.status == "completed":
        return ApiError(410, f"There is no {variant} of this clip", param="variant", code="video_gone", headers=headers)
    if clip.status == "failed":
        reason, headers = clip.error.message if clip.error else "unknown", headers | gpu_header(clip.gpu_s)
        return ApiError(409, f"The clip failed: {reason}", param="video_id", code="video_failed", headers=headers)
    message = f"There is no {variant} yet; the clip is {clip.status}, {clip.progress} %"
    return ApiError(409, message, param="video_id", code="video_not_ready", headers={"Retry-After": "1"})
