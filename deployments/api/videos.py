"""/v1/videos: clips as durable jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.context import ApiContext
from deployments.api.documents import body_document, error_documents
from deployments.api.reading import read_json_or_form
from deployments.api.video_answers import Video, VideoDeleted, VideoPage
from deployments.api.video_lookup import find_job, no_video
from deployments.requests.bodies import PageQuery, VideoBody
from deployments.requests.rules import clip_length, media_request, ready_card

POLL_MS = 500
"""What clients that poll are told to wait between two looks."""


def video_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["videos"], dependencies=[Depends(context.authorize)])

    @router.post(
        "/v1/videos",
        responses=error_documents(400, 401, 404, 413, 415, 429, 503),
        openapi_extra=body_document(VideoBody, "application/json", "multipart/form-data"),
    )
    async def create_video(request: Request, response: Response) -> Video:
        """Queue a clip. The job is on disk before the answer, and survives a restart."""
        body = await read_json_or_form(request, VideoBody)
        card = await ready_card(context.studio, body.model, "video")
        num_frames, fps = clip_length(body.seconds, body.num_frames, body.fps, card.defaults)
        wanted = media_request(
            body,
            card,
            request.state.request_id,
            num_frames=num_frames,
            fps=fps,
            num_previews=context.settings.num_clip_previews,
        )
        seconds = f"{num_frames / fps:.3f}".rstrip("0").rstrip(".") if body.seconds is None else str(body.seconds)
        response.headers["openai-poll-after-ms"] = str(POLL_MS)
        return Video.of(await context.jobs.submit(wanted, seconds))

    @router.get("/v1/videos", responses=error_documents(400, 401, 404))
    async def list_videos(query: Annotated[PageQuery, Query()]) -> VideoPage:
        """Clips, the newest first unless order is asc."""
        last = None if query.after is None else await find_job(context.jobs, query.after, "after")
        return VideoPage.of(*await context.jobs.page(after=last, limit=query.limit, ascending=query.order == "asc"))

    @router.get("/v1/videos/{video_id}", responses=error_documents(401, 404))
    async def read_video(video_id: str, response: Response) -> Video:
        """One clip: where it is in the queue or in its steps, or why it failed."""
        response.headers["openai-poll-after-ms"] = str(POLL_MS)
        return Video.of(await find_job(context.jobs, video_id))

    @router.delete("/v1/videos/{video_id}", responses=error_documents(401, 404))
    async def delete_video(video_id: str) -> VideoDeleted:
        """Stop the job if it still runs, and delete its record and files."""
        await find_job(context.jobs, video_id)
        if not await context.jobs.delete(video_id):
            raise no_video(video_id, "video_id")
        return VideoDeleted(id=video_id)

    return router
