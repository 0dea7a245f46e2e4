"""From the id in a path to a job."""

from __future__ import annotations

import re

from deployments.api.errors import ApiError, shown
from deployments.clips.clips import Jobs
from deployments.clips.records import Job

VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")


async def find_job(jobs: Jobs, video_id: str, param: str = "video_id") -> Job:
    """ApiError 404 if there is none. Only what looks like an id gets to the database."""
    job = await jobs.get(video_id) if VIDEO_ID.fullmatch(video_id) else None
    if job is None:
        raise no_video(video_id, param)
    return job


def no_video(video_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no video {shown(video_id)}", param=param, code="video_not_found")
