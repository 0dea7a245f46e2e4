"""Files of batches, and /v1/batches, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.asyncio_tools import finish, to_the_end
from deployments.batches.records import BatchRecord, BatchStatus, FileRecord
from deployments.clips.storage import UNAVAILABLE
from deployments.http.answers import page_ends
from deployments.http.body import FORM, JSON, check_content_type, parse_json
from deployments.http.context import BATCH_KEY, ApiContext
from deployments.http.errors import ApiError
from deployments.http.forms import parse_form
from deployments.http.lookups import find_file, no_file
from deployments.http.openapi_text import error_documents, file_answers
from deployments.http.partial import ranged
from deployments.http.uploads import counting
from deployments.requests.bodies import FilesQuery, ListQuery
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.rules import Requester
from deployments.requests.validation import validated

WINDOW_S = 86400
PURPOSES = ("batch", "user_data")
"""Purposes of an uploaded file: JSON lines of a batch, or a clip that requests name."""
BATCH_PURPOSES = ("batch", "batch_output")
JSON_LINES, BYTES = "application/jsonl", "application/octet-stream"
Label = Annotated[str, StringConstraints(max_length=64)]
Short = Annotated[str, StringConstraints(max_length=512)]


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: FileRecord) -> FileObject:
        return cls(**asdict(file), bytes=file.num_bytes)


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: BatchRecord) -> BatchObject:
        ends = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        fields = asdict(batch) | {f"{name}_at": batch.times.get(name) for name in ends}
        fields["errors"] = BatchErrors(data=batch.errors) if batch.errors else None
        counts = RequestCounts(total=batch.num_total, completed=batch.num_completed, failed=batch.num_failed)
        return cls(**fields, request_counts=counts)


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchBody(BaseModel):
    """Body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: Short
    endpoint: Literal["/v1/images/generations", "/v1/images/edits", "/v1/videos"]
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[Label, Short], Field(max_length=16)] | None = None


def batch_routes(context: ApiContext) -> APIRouter:
    authorized = Depends(context.authorize)
    router = APIRouter(tags=["batches"], dependencies=[authorized])
    _add_file_routes(router, context)
    store = context.batches

    @router.post("/v1/batches", responses=error_documents(400, 401, 403, 404, 408, 413, 415, 503), openapi_extra=ORDER)
    async def create_batch(request: Request, requester: Requester = authorized) -> BatchObject:
        """Create a batch: all requests of a file are made within a day, when there is room."""
        check_content_type(request, JSON)
        body = validated(BatchBody, parse_json(await request.body()))
        file = await find_file(context, requester, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id is a file with the purpose {file.purpose}; upload it with the purpose batch"
            raise RequestError(message, "input_file_id")
        now = int(time.time())
        batch = BatchRecord(
            id=f"batch_{uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        await store.add(batch, requester.key)
        return BatchObject.of(batch)

    @router.get("/v1/batches", responses=error_documents(400, 401, 404, 503))
    async def list_batches(query: Annotated[ListQuery, Query()], requester: Requester = authorized) -> BatchList:
        """List batches, the newest first."""
        if query.after is not None:
            await find_batch(context, requester, query.after, "after")
        found = await store.page(context.viewer(requester), query.after, query.limit + 1)
        data = [BatchObject.of(batch) for batch in found[: query.limit]]
        return BatchList(data=data, **page_ends(data), has_more=len(found) > query.limit)

    @router.get("/v1/batches/{batch_id}", responses=error_documents(401, 404, 503))
    async def read_batch_record(batch_id: str, requester: Requester = authorized) -> BatchObject:
        """Return one batch: its status, its counts and the files of its answers."""
        return BatchObject.of(await find_batch(context, requester, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", responses=error_documents(401, 403, 404, 503))
    async def cancel_batch(batch_id: str, requester: Requester = authorized) -> BatchObject:
        """Cancel a batch. Finished results are in its files."""
        await find_batch(context, requester, batch_id)
        await store.cancel(batch_id)
        return BatchObject.of(await find_batch(context, requester, batch_id))

    return router


def _add_file_routes(router: APIRouter, context: ApiContext) -> None:
    authorized, store = Depends(context.authorize), context.batches

    @router.post(
        "/v1/files", responses=error_documents(400, 401, 403, 408, 409, 413, 415, 503, 507), openapi_extra=UPLOAD
    )
    async def create_file(request: Request, requester: Requester = authorized) -> FileObject:
        """Upload a file of JSON lines for a batch, or a clip that requests name by the file's id."""
        with context.admission.memory.taken() as take:
            receive = counting(request.receive, take, context.settings.max_body_bytes)
            form = await read_file_form(Request(request.scope, receive))
            return FileObject.of(await _store_file(context, requester, *form))

    @router.get("/v1/files", responses=error_documents(400, 401, 404, 503))
    async def list_files(query: Annotated[FilesQuery, Query()], requester: Requester = authorized) -> FileList:
        """List uploaded files and those of batches, the newest first unless order is asc."""
        viewer, number = context.viewer(requester), None
        if query.after is not None:
            number = (await find_file(context, requester, query.after, "after")).number
        is_rising = query.order == "asc"
        found = await store.files(viewer, number, query.limit + 1, is_rising=is_rising, purpose=query.purpose)
        data = [FileObject.of(file) for file in found[: query.limit]]
        return FileList(data=data, **page_ends(data), has_more=len(found) > query.limit)

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses=file_answers(JSON_LINES, BYTES) | error_documents(401, 404, 416, 503),
    )
    async def read_file_content(file_id: str, requester: Requester = authorized) -> Response:
        """Return the content of a file."""
        record = await find_file(context, requester, file_id)
        file = await asyncio.to_thread(context.contents.find, record.id)
        if file is None:
            raise no_file(file_id, "file_id")
        media_type = JSON_LINES if record.purpose in BATCH_PURPOSES else BYTES
        return ranged(file, media_type=media_type, filename=record.filename)

    @router.delete("/v1/files/{name}", responses=error_documents(401, 403, 404, 503))  # one path, one name for it
    async def delete_file(name: str, requester: Requester = authorized) -> FileDeleted:
        """Delete a file by its id."""
        record = await find_file(context, requester, name, "name")
        await asyncio.to_thread(context.contents.remove, record.id)
        await store.remove_file(record.id)
        return FileDeleted(id=record.id)


async def _store_file(
    context: ApiContext, requester: Requester, filename: str, data: bytes, purpose: str
) -> FileRecord:
    """Return the record of a new file. Whatever fails, nothing of it is left. ApiError 409 without a place for it."""
    file_id, limit = f"file-{uuid4().hex}", context.settings.max_stored_bytes
    await _check_place(context, requester, len(data))
    try:
        await finish(asyncio.to_thread(context.contents.write, file_id, data))
        file = await context.batches.add_file(requester.key, filename, purpose, len(data), file_id, limit)
        if file is None:  # another upload has taken the place since the check
            raise await _no_place(context, requester, len(data))
    except BaseException:
        with suppress(*UNAVAILABLE):
            await to_the_end(_undo_upload(context, file_id))
        raise
    return file


async def _undo_upload(context: ApiContext, file_id: str) -> None:
    """Delete a file without an answer. The record goes first: while it is there, its content is."""
    await context.batches.remove_file(file_id)
    await asyncio.to_thread(context.contents.remove, file_id)


async def _check_place(context: ApiContext, requester: Requester, num_bytes: int) -> None:
    """Raise ApiError 409 if the requester's files leave no place for one of ``num_bytes``."""
    if await context.batches.stored_bytes(requester.key) + num_bytes > context.settings.max_stored_bytes:
        raise await _no_place(context, requester, num_bytes)


async def _no_place(context: ApiContext, requester: Requester, num_bytes: int) -> ApiError:
    limit, stored = context.settings.max_stored_bytes, await context.batches.stored_bytes(requester.key)
    message = f"The file has {num_bytes} bytes, and files of {stored} are here; all may have {limit}: delete some"
    return ApiError(409, message, param="file", code="too_many_files")


FILE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines, or a clip."},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
    },
    "required": ["file", "purpose"],
}
UPLOAD: dict[str, Any] = {"requestBody": {"required": True, "content": {FORM: {"schema": FILE_SCHEMA}}}}


ORDER: dict[str, Any] = {
    "requestBody": {"required": True, "content": {JSON: {"schema": BatchBody.model_json_schema()}}}
}


async def read_file_form(request: Request) -> tuple[str, bytes, str]:
    """Return name, content and purpose of the file in a form. RequestError if it is another form."""
    check_content_type(request, FORM)
    fields = dict((await parse_form(request)).multi_items())
    file, purpose = fields.pop("file", None), fields.pop("purpose", None)
    if not isinstance(file, UploadFile):
        raise RequestError("file is required: a file of JSON lines, or a clip", "file", code="missing_field")
    if purpose not in PURPOSES:
        raise RequestError(f"purpose is {shown(str(purpose))}; it must be {' or '.join(PURPOSES)}", "purpose")
    if fields:
        name = next(iter(fields))
        raise RequestError(f"{shown(name)} is unknown; the form has file and purpose", name, code="unknown_field")
    usual = "batch.jsonl" if purpose == "batch" else "file"
    return (file.filename or usual).replace("\0", "")[:255], await file.read(), str(purpose)


async def find_batch(context: ApiContext, requester: Requester, batch_id: str, param: str = "batch_id") -> BatchRecord:
    """Return a batch. ApiError 404 if there is none that the client may see."""
    is_id = re.fullmatch(r"batch_[0-9a-f]{32}", batch_id)
    batch = await context.batches.get(batch_id, context.viewer(requester)) if is_id else None
    if batch is None:
        raise ApiError(404, f"There is no batch {shown(batch_id)}", param=param)
    return batch


class InnerRequests:
    """Requests of batches, made by the application itself: with all its rules, and without a connection."""

    def __init__(self, app: FastAPI, poll_s: float) -> None:
        self._app, self._poll_s = app, poll_s

    async def send(
        self, path: str, key_hash: str, body: Mapping[str, Any], idempotency_key: str
    ) -> tuple[int, Mapping[str, str], Any]:
        """Make one request; of a clip return what has become of it in the end."""
        import httpx  # for those that use it

        async def as_key(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, BATCH_KEY: key_hash}, receive, send)

        transport = httpx.ASGITransport(as_key, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            request_id = f"req_{uuid4().hex}"  # behind Ray's proxy, answers have none
            client.headers["X-Request-Id"] = request_id
            answer = await client.post(path, json=body, headers={"Idempotency-Key": idempotency_key})
            if path == "/v1/videos" and answer.is_success:
                clip = f"{path}/{answer.json()['id']}"
                while answer.is_success and answer.json()["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(self._poll_s)
                    answer = await client.get(clip)
            answer.headers["X-Request-Id"] = request_id
            return answer.status_code, answer.headers, json.loads(answer.content)
