"""/v1/videos: clips, their bytes, and their progress as a stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import FileResponse
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.answers import Video, VideoDeleted, VideoEvent, VideoPage
from deployments.api.context import ApiContext
from deployments.api.documents import body_document, error_documents, file_answers, stream_answers
from deployments.api.errors import ApiError
from deployments.api.files import RangedFile
from deployments.api.reading import read_json_or_form
from deployments.api.streams import start_stream
from deployments.clips.clips import Clips
from deployments.clips.folders import CONTENT_TYPES, Variant
from deployments.clips.records import FILE_GONE, ClipRecord
from deployments.requests.bodies import ContentQuery, PageQuery, VideoBody
from deployments.requests.clips import clip_request
from deployments.requests.errors import shown

VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")
EventName = Literal["video.progress", "video.completed", "video.failed"]
ENDS: dict[str, EventName] = {"completed": "video.completed", "failed": "video.failed"}
POLL_MS = 500
"""What clients that poll are told to wait between two looks."""


def video_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["videos"], dependencies=[Depends(context.authorize)])

    @router.post(
        "/v1/videos",
        responses=error_documents(400, 401, 404, 413, 415, 429, 503, 507),
        openapi_extra=body_document(VideoBody, "application/json", "multipart/form-data"),
    )
    async def create_video(request: Request, response: Response) -> Video:
        """Queue a clip. Its record is on disk before the answer, and survives a restart."""
        body = await read_json_or_form(request, VideoBody)
        num_previews = context.settings.num_clip_previews
        clip = clip_request(body, context.studio.cards(), request.state.request_id, num_previews)
        await context.check_ready(clip.request.model)
        response.headers["openai-poll-after-ms"] = str(POLL_MS)
        return Video.of(await context.clips.submit(clip.request, clip.seconds))

    @router.get("/v1/videos", responses=error_documents(400, 401, 404))
    async def list_videos(query: Annotated[PageQuery, Query()]) -> VideoPage:
        """Clips, the newest first unless order is asc."""
        last = None if query.after is None else await find_clip(context.clips, query.after, "after")
        return VideoPage.of(*await context.clips.page(after=last, limit=query.limit, ascending=query.order == "asc"))

    @router.get("/v1/videos/{video_id}", responses=error_documents(401, 404))
    async def read_video(video_id: str, response: Response) -> Video:
        """One clip: where it is in the queue or in its steps, or why it failed."""
        response.headers["openai-poll-after-ms"] = str(POLL_MS)
        return Video.of(await find_clip(context.clips, video_id))

    @router.delete("/v1/videos/{video_id}", responses=error_documents(401, 404))
    async def delete_video(video_id: str) -> VideoDeleted:
        """Stop the clip if it is still being made, and delete its record and files."""
        await find_clip(context.clips, video_id)
        if not await context.clips.delete(video_id):
            raise no_video(video_id, "video_id")
        return VideoDeleted(id=video_id)

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=FileResponse,
        responses=file_answers(*CONTENT_TYPES.values()) | error_documents(400, 401, 404, 409, 410, 416),
    )
    async def read_content(
        video_id: str,
        query: Annotated[ContentQuery, Query()],
        range_header: Annotated[str | None, Header(alias="Range", examples=["bytes=0-1023"])] = None,
    ) -> Response:
        """The clip as MP4 (H.264), a still of it as WebP, or a preview as PNG. One byte range is honoured."""
        clip, variant = await find_clip(context.clips, video_id), query.variant
        may_be_there = variant == "preview" or clip.status == "completed"
        path = await context.clips.file(video_id, variant) if may_be_there else None
        if path is None:
            raise await not_there(context.clips, clip, variant)
        suffix = path.suffix[1:]
        return RangedFile(
            path,
            media_type=CONTENT_TYPES[variant],
            filename=f"{video_id}.{suffix}",
            content_disposition_type="inline",
            headers={"Cache-Control": "private, no-cache"},
        )

    @router.get("/v1/videos/{video_id}/events", responses=stream_answers() | error_documents(401, 404))
    async def read_events(video_id: str, request: Request) -> Response:
        """Server-sent events while the clip is made, from now to its end; beyond OpenAI."""
        await find_clip(context.clips, video_id)
        events = video_events(context.clips, video_id, context.settings.video_poll_s)
        return await start_stream(events, request.receive, context.settings)

    return router


async def find_clip(clips: Clips, video_id: str, param: str = "video_id") -> ClipRecord:
    """Returns the clip, or raises ApiError 404. Only what looks like an id gets to the database."""
    clip = await clips.get(video_id) if VIDEO_ID.fullmatch(video_id) else None
    if clip is None:
        raise no_video(video_id, param)
    return clip


def no_video(video_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no video {shown(video_id)}", param=param, code="video_not_found")


async def not_there(clips: Clips, clip: ClipRecord, variant: Variant) -> ApiError:
    """Returns the answer where the file is not. A completed clip without one has failed after all."""
    if clip.status == "completed" and variant == "video":
        clip = await clips.note_lost(clip.id) or clip
    headers = {"x-should-retry": "false"}
    if clip.error is not None and clip.error.code == FILE_GONE:
        return ApiError(410, clip.error.message, param="video_id", code="video_gone", headers=headers)
    if clip.status == "completed":
        return ApiError(410, f"There is no {variant} of this clip", param="variant", code="video_gone", headers=headers)
    if clip.status == "failed":
        reason = clip.error.message if clip.error else "unknown"
        return ApiError(409, f"The clip failed: {reason}", param="video_id", code="video_failed", headers=headers)
    message = f"There is no {variant} yet; the clip is {clip.status}, {clip.progress} %"
    return ApiError(409, message, param="video_id", code="video_not_ready", headers={"Retry-After": "1"})


async def video_events(clips: Clips, video_id: str, poll_s: float) -> AsyncGenerator[VideoEvent, None]:
    """Yields what changes about the clip, by the database: it may be made in another process."""
    last_sent: Video | None = None
    while clip := await clips.get(video_id):
        video = Video.of(clip)
        if clip.status in ENDS:
            yield VideoEvent(type=ENDS[clip.status], video=video)
            return
        if video != last_sent:
            yield VideoEvent(type="video.progress", video=video)
            last_sent = video
        await asyncio.sleep(poll_s)
    yield VideoEvent(type="video.deleted", video=None)
