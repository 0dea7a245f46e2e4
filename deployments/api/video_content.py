"""The bytes of a clip, and its progress as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import FileResponse
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.context import ApiContext
from deployments.api.documents import error_documents, file_answers, stream_answers
from deployments.api.errors import ApiError
from deployments.api.event_stream import start_stream
from deployments.api.ranges import tame_range
from deployments.api.video_answers import Video, VideoEvent
from deployments.api.video_lookup import find_job
from deployments.clips.clips import Jobs
from deployments.clips.folders import CONTENT_TYPES, Variant
from deployments.clips.records import Job
from deployments.requests.bodies import ContentQuery

EventName = Literal["video.progress", "video.completed", "video.failed"]

ENDS: dict[str, EventName] = {"completed": "video.completed", "failed": "video.failed"}


def video_content_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["videos"], dependencies=[Depends(context.authorize)])

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=FileResponse,
        responses=file_answers(*CONTENT_TYPES.values()) | error_documents(400, 401, 404, 409, 416),
    )
    async def read_content(
        video_id: str,
        request: Request,
        query: Annotated[ContentQuery, Query()],
        range_header: Annotated[str | None, Header(alias="Range", examples=["bytes=0-1023"])] = None,
    ) -> Response:
        """The clip as MP4 (H.264), a still of it as WebP, or a preview as PNG. One byte range is honoured."""
        job, variant = await find_job(context.jobs, video_id), query.variant
        path = context.jobs.file(video_id, variant)
        if not (variant == "preview" or job.status == "completed") or not await asyncio.to_thread(path.is_file):
            raise not_there(job, variant)
        tame_range(request.scope, path.stat().st_size)
        suffix = path.suffix[1:]
        return FileResponse(
            path,
            media_type=CONTENT_TYPES[variant],
            filename=f"{video_id}.{suffix}",
            content_disposition_type="inline",
            headers={"Cache-Control": "private, no-cache"},
        )

    @router.get("/v1/videos/{video_id}/events", responses=stream_answers() | error_documents(401, 404))
    async def read_events(video_id: str, request: Request) -> Response:
        """Server-sent events as the job goes on, from now to its end; beyond OpenAI."""
        await find_job(context.jobs, video_id)
        events = video_events(context.jobs, video_id, context.settings.video_poll_s)
        return await start_stream(events, request.receive, context.settings)

    return router


def not_there(job: Job, variant: Variant) -> ApiError:
    if job.status == "failed":
        reason = job.error.message if job.error else "unknown"
        headers = {"x-should-retry": "false"}
        return ApiError(409, f"The job failed: {reason}", param="video_id", code="video_failed", headers=headers)
    message = f"There is no {variant} yet; the job is {job.status}, {job.progress} %"
    return ApiError(409, message, param="video_id", code="video_not_ready", headers={"Retry-After": "1"})


async def video_events(jobs: Jobs, video_id: str, poll_s: float) -> AsyncGenerator[VideoEvent, None]:
    """What changes about the job. Read from the database: the job may run in another process."""
    told: Video | None = None
    while job := await jobs.get(video_id):
        video = Video.of(job)
        if job.status in ENDS:
            yield VideoEvent(type=ENDS[job.status], video=video)
            return
        if video != told:
            yield VideoEvent(type="video.progress", video=video)
            told = video
        await asyncio.sleep(poll_s)
    yield VideoEvent(type="video.deleted", video=None)
