"""What the video routes answer, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from deployments.api.answers import StageTimes
from deployments.api.event_stream import Event
from deployments.clips.records import Job


class VideoError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(ge=0, le=100, description="Per cent of the steps; 100 when the file is there.")
    created_at: int
    completed_at: int | None
    expires_at: int | None = None
    prompt: str
    remixed_from_video_id: str | None = None
    seconds: str
    size: str
    error: VideoError | None
    seed: int = Field(description="The seed that makes this clip again; beyond OpenAI.")
    num_frames: int = Field(description="beyond OpenAI")
    fps: int = Field(description="beyond OpenAI")
    num_inference_steps: int = Field(description="beyond OpenAI")
    num_previews: int = Field(description="Previews so far, the last at variant=preview; beyond OpenAI.")
    timings: StageTimes | None = Field(description="beyond OpenAI")

    @classmethod
    def of(cls, job: Job) -> Video:
        request = job.request
        return cls(
            id=job.id,
            model=request.model,
            status=job.status,
            progress=job.progress,
            created_at=job.created_at,
            completed_at=job.completed_at,
            prompt=request.prompt,
            seconds=job.seconds,
            size=f"{request.width}x{request.height}",
            error=VideoError(code=job.error.code, message=job.error.message) if job.error else None,
            seed=request.seed,
            num_frames=request.num_frames,
            fps=request.fps,
            num_inference_steps=request.num_inference_steps,
            num_previews=job.num_previews,
            timings=StageTimes.of(job.timings) if job.timings else None,
        )


class VideoPage(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, jobs: list[Job], has_more: bool) -> VideoPage:
        data = [Video.of(job) for job in jobs]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class VideoEvent(Event):
    """video.progress whenever something changed, then one of video.completed, video.failed, video.deleted."""

    type: Literal["video.progress", "video.completed", "video.failed", "video.deleted"]
    video: Video | None
