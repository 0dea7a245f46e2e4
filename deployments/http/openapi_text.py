"""The OpenAPI document: bodies that the routes read by themselves, errors, headers, streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.http.answers import (
    CompletedEdit,
    CompletedImage,
    ImagesResponse,
    PartialEdit,
    PartialImage,
    QueuedPicture,
    StepProgress,
    VideoEvent,
)
from deployments.http.body import FORM
from deployments.http.errors import GPU_HEADER, ErrorBody, ErrorEvent
from deployments.requests.bodies import EditBody, ImageBody, MediaBody, VideoBody

IMAGE_EVENTS = (QueuedPicture, PartialImage, CompletedImage, StepProgress, ErrorEvent)
EDIT_EVENTS = (QueuedPicture, PartialEdit, CompletedEdit, StepProgress, ErrorEvent)
VIDEO_EVENTS = (VideoEvent, ErrorEvent)
WITH_PICTURES: tuple[type[MediaBody], ...] = (EditBody, VideoBody)
UNSEEN_MODELS: tuple[type[BaseModel], ...] = tuple(
    dict.fromkeys((ImageBody, *WITH_PICTURES, *IMAGE_EVENTS, *EDIT_EVENTS, VideoEvent, ErrorBody))
)
"""Bodies that routes read by themselves, events, and errors: FastAPI does not see them."""
REFERENCE = "#/components/schemas/{model}"
ERROR_CONTENT = {"application/json": {"schema": {"$ref": REFERENCE.format(model=ErrorBody.__name__)}}}
ERRORS = {
    400: "A value is missing, unknown, or not allowed; `param` says which",
    401: "The API key is missing or not known",
    403: "`Host` is no name of this server, a page of another origin sent it, or the adapter is another key's",
    404: "There is no such model, clip, file or adapter",
    405: "The method is not allowed at this path",
    408: "The body did not arrive in time",
    409: "The clip is not finished, the Idempotency-Key was used with another body, or the limit of files is reached",
    410: "The file no longer exists",
    413: "The body is too large, or a picture, clip or adapter in it",
    415: "The content type is not supported",
    416: "The range is beyond the end of the file",
    429: "A queue is full or a limit of the key is reached; retry after `Retry-After` seconds",
    500: "An internal error; the log has more under the request id",
    502: "The ranks that worked on the request failed twice",
    503: "The model is not ready, the server is full, or storage is unavailable; retry after `Retry-After` seconds",
    507: "There is no room on the server's disk",
}
CODES = {
    400: (
        "invalid_value",
        "missing_field",
        "unknown_field",
        "wrong_kind",
        "lora_not_found",
        "recipe_not_found",
        "bad_json",
        "bad_picture",
        "bad_video",
    ),
    401: ("missing_api_key", "invalid_api_key"),
    403: ("host_not_allowed", "origin_not_allowed", "lora_of_other_key"),
    404: ("model_not_found", "video_not_found", "not_found"),
    405: ("method_not_allowed",),
    408: ("body_timeout",),
    409: (
        "video_not_ready",
        "video_failed",
        "idempotency_key_reused",
        "lora_exists",
        "too_many_loras",
        "too_many_files",
    ),
    410: ("video_gone",),
    413: ("body_too_large", "picture_too_large", "video_too_large"),
    415: ("unsupported_content_type", "unsupported_content_encoding"),
    416: ("range_not_satisfiable",),
    429: ("queue_full", "too_late", "key_limit", "too_many_watchers"),
    500: ("internal", "job_failed", "gave_up"),
    502: ("gang_broken",),
    503: ("model_not_ready", "server_full", "server_stopping", "storage_unavailable", "accounts_unavailable"),
    507: ("storage_full",),
}
EVERYWHERE = (405, 500)
MAKING = (400, 401, 403, 404, 408, 409, 413, 415, 429, 502, 503, 507)
"""Errors of what makes pictures or clips."""
HEADERS = {
    "X-Request-Id": "Id of the request, also in the log: the client's own, or a new one",
    "Retry-After": "Seconds to wait before a retry",
    "WWW-Authenticate": "Bearer",
    "Allow": "Allowed methods of the path",
    "Content-Range": "Range of bytes, and the size of the file",
    "ETag": "Changes with the file; send it back as If-None-Match",
    "Last-Modified": "Send it back as If-Modified-Since",
    "Accept-Ranges": "bytes",
    "Server-Timing": "queue, encode, denoise, decode, total in ms",
    "X-Troupe-Warm": "true if steps of this shape were compiled and captured before",
    "X-Troupe-Cache": "Step cache of the request: off, conservative or fast",
    "X-Troupe-Same-Bytes": "true if the seed gives these bytes again; false: the same picture with other bytes",
    GPU_HEADER: "Rank-seconds of all steps; for an error, those known so far",
    "X-Troupe-Eta": "Predicted seconds until the end, from arrival at the gang; for an unfinished clip, from now; "
    "absent without a prediction",
    "X-Troupe-Video-Id": "Id of the clip",
    "X-Troupe-Prompt-Enhancer": "revised, or why the prompt was not rewritten "
    "(timeout, unreachable, refused, invalid); absent without an enhancer",
    "Idempotent-Replayed": "true if the answer is that of an earlier identical request",
    "openai-poll-after-ms": "Milliseconds until the next poll",
}
ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 416: "Content-Range", 429: "Retry-After", 503: "Retry-After"}
AFTER_WORK = (400, 409, 429, 500, 502, 503, 507)
"""Errors that there may be when ranks have worked already."""
MEASURES = (
    "Server-Timing",
    "X-Troupe-Warm",
    "X-Troupe-Cache",
    "X-Troupe-Same-Bytes",
    GPU_HEADER,
    "X-Troupe-Eta",
    "X-Troupe-Prompt-Enhancer",
)
FILE_HEADERS = ("ETag", "Last-Modified", "Accept-Ranges")

Responses = dict[int | str, dict[str, Any]]


def header_documents(*names: str) -> dict[str, Any]:
    return {name: {"description": HEADERS[name], "schema": {"type": "string"}} for name in names}


def error_documents(*statuses: int, has_work: bool = False) -> Responses:
    """Return the OpenAPI documents of errors by status.

    ``has_work``: ranks work for the route, and had perhaps when it failed. The schema is a reference: of a ``model``
    FastAPI would make a validator for each status of each route.
    """
    if has_work:
        statuses = (*statuses, 500)
    return {status: _error_document(status, has_work=has_work) | {"content": ERROR_CONTENT} for status in statuses}


def _error_document(status: int, *, has_work: bool = False) -> dict[str, Any]:
    codes = ", ".join(f"`{code}`" for code in CODES[status])
    headers = [ERROR_HEADERS[status]] if status in ERROR_HEADERS else []
    headers += [GPU_HEADER] if has_work and status in AFTER_WORK else []
    return {"description": f"{ERRORS[status]}. `code`: {codes}", "headers": header_documents(*headers)}


def body_document(model: type[MediaBody], *content_types: str) -> dict[str, Any]:
    """Return the OpenAPI fields of a route that reads its body itself, which FastAPI cannot know."""
    schema, form = _reference(model), {"$ref": REFERENCE.format(model=form_name(model))}
    types = content_types or ("application/json",)
    content = {one: {"schema": form if one == FORM and model.picture_fields else schema} for one in types}
    return {"requestBody": {"required": True, "content": content}}


def form_name(model: type[MediaBody]) -> str:
    return f"{model.__name__.removesuffix('Body')}Form"


def form_schema(model: type[MediaBody], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the ``schema`` of a body as that of a form, in which pictures are files."""
    file = {"type": "string", "format": "binary"}
    files = {
        name: {"type": "array", "items": file, "description": schema["properties"][name]["description"]}
        for name in model.picture_fields
    }
    return schema | {"title": form_name(model), "properties": schema["properties"] | files}


def image_answers(*events: type[BaseModel]) -> Responses:
    """Return the schema of an answer with pictures, as one JSON object or as ``events``."""
    names = tuple(str(event.model_fields["type"].default) for event in events)
    answer = {"model": ImagesResponse, "description": "The pictures", "headers": header_documents(*MEASURES)}
    return {200: answer | {"content": _event_content(names, events)}}


def stream_answers() -> Responses:
    """Return the schema of a clip's event stream."""
    names = ("video.progress", "video.completed", "video.failed", "video.deleted", "error")
    return {200: {"description": "Events", "content": _event_content(names, VIDEO_EVENTS)}}


def video_answers() -> Responses:
    """Return the headers of an answer with a clip's record."""
    headers = header_documents("openai-poll-after-ms", "X-Troupe-Eta", GPU_HEADER, "X-Troupe-Prompt-Enhancer")
    return {200: {"description": "The clip's record", "headers": headers}}


def sync_answers() -> Responses:
    """Return the schema of an answer that waits for a clip's file."""
    headers = header_documents("X-Troupe-Video-Id", *MEASURES, *FILE_HEADERS)
    return {200: {"description": "The clip", "content": _file_content("video/mp4"), "headers": headers}}


def file_answers(*content_types: str, headers: tuple[str, ...] = ()) -> Responses:
    """Return the schemas of answers with a file: whole (200), a range of it (206), or neither."""
    file = {"content": _file_content(*content_types), "headers": header_documents(*FILE_HEADERS, *headers)}
    part = file | {"headers": header_documents(*FILE_HEADERS, *headers, "Content-Range")}
    unchanged = {"description": "Not modified", "headers": header_documents("ETag")}
    return {200: file | {"description": "The file"}, 206: part | {"description": "The requested range"}, 304: unchanged}


def _file_content(*content_types: str) -> dict[str, Any]:
    return {one: {"schema": {"type": "string", "format": "binary"}} for one in content_types}


def _event_content(names: tuple[str, ...], models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """Return the OpenAPI 3.2 schema of one event: its data is JSON, with the name in ``type``."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": [_reference(model) for model in models]},
    }
    properties = {"event": {"type": "string", "enum": list(names)}, "data": data}
    return {"text/event-stream": {"schema": {"type": "object", "properties": properties, "required": ["data"]}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def add_document(app: FastAPI) -> None:
    """Make ``app`` serve a document that includes the bodies and the events."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _build(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, extra = models_json_schema([(model, "validation") for model in UNSEEN_MODELS], ref_template=REFERENCE)
    schemas = document["components"]["schemas"]
    schemas |= extra["$defs"]
    schemas |= {form_name(model): form_schema(model, schemas[model.__name__]) for model in WITH_PICTURES}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            _complete(operation)
    return document


def _complete(operation: dict[str, Any]) -> None:
    """Add what all routes share: two errors, the request id, and the optional key."""
    responses = operation["responses"]
    responses.pop("422", None)  # this API answers 400
    everywhere = {str(status): _error_document(status) | {"content": ERROR_CONTENT} for status in EVERYWHERE}
    operation["responses"] = responses = everywhere | responses
    for response in responses.values():
        response["headers"] = header_documents("X-Request-Id") | response.get("headers", {})
    if "security" in operation:
        operation["security"] = [{}, *operation["security"]]
