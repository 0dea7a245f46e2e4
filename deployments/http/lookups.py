"""Look-ups of clips and files by id, within the client's rights, and of the clip that a request names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from deployments.batches.records import FileRecord
from deployments.clips.database import ClipRecord
from deployments.clips.objects import StoredObject
from deployments.http.context import ApiContext
from deployments.http.errors import ApiError
from deployments.requests.pictures.sources import VIDEO, VIDEO_MASK, Source, check_num_bytes, max_bytes_of
from deployments.requests.pictures.unpack import MASK_FIELD
from deployments.requests.request_errors import shown
from deployments.requests.rules import Requester

VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


async def find_clip(context: ApiContext, requester: Requester, video_id: str, param: str = "video_id") -> ClipRecord:
    """Return the clip. ApiError 404 if there is none that the client may see.

    Only what looks like an id gets to the database.
    """
    clip = await context.clips.get(video_id) if VIDEO_ID.fullmatch(video_id) else None
    if clip is None or context.viewer(requester) not in (None, clip.key_hash):
        raise no_video(video_id, param)
    return clip


def no_video(video_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no video {shown(video_id)}", param=param, code="video_not_found")


async def find_file(context: ApiContext, requester: Requester, file_id: str, param: str = "file_id") -> FileRecord:
    """Return a file. ApiError 404 if there is none that the client may see."""
    file = await context.batches.file(file_id, context.viewer(requester)) if FILE_ID.fullmatch(file_id) else None
    if file is None:
        raise no_file(file_id, param)
    return file


def no_file(file_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no file {shown(file_id)}", param=param)


def clip_id_of(source: Source | None) -> str | None:
    """Return the id of a clip that ``source`` is; None of any other source."""
    return source if isinstance(source, str) and VIDEO_ID.fullmatch(source) else None


async def read_source(
    context: ApiContext, requester: Requester, source: Source, param: str, *, take: Callable[[int], None]
) -> Source:
    """Return the content of the file or clip whose id ``source`` is, or else ``source`` itself, of the field ``param``.

    Its bytes are reserved by ``take`` before they are read. ApiError 404 if the client may see no such file or clip,
    409 for a clip without a file; RequestError if it is too large.
    """
    if not isinstance(source, str):
        return source
    if source.startswith("file-"):
        record = await find_file(context, requester, source, param)
        file = await asyncio.to_thread(context.contents.find, record.id)
    elif source.startswith("video_"):
        file = await _clip_file(context, await find_clip(context, requester, source, param), param)
    else:
        return source
    try:
        if file is None:
            raise FileNotFoundError(source)
        num_bytes = file.num_bytes if isinstance(file, StoredObject) else file.stat().st_size
        kind = VIDEO_MASK if param == MASK_FIELD else VIDEO
        check_num_bytes(num_bytes, param, max_bytes_of(kind, context.settings), kind)
        take(num_bytes)
        return await asyncio.to_thread(file.read_bytes)
    except FileNotFoundError:  # deleted meanwhile
        raise no_file(source, param) from None


async def _clip_file(context: ApiContext, clip: ClipRecord, param: str) -> Path | StoredObject:
    file = await context.clips.file(clip.id, "video") if clip.status == "completed" else None
    if file is None:
        message = f"{param} is {shown(clip.id)}, a clip without a file: it is {clip.status}; take one that is completed"
        raise ApiError(409, message, param=param, code="video_not_ready")
    return file
