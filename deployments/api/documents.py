"""The OpenAPI document: bodies that the routes read by themselves, errors, streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.answers import CompletedImage, ImagesResponse, PartialImage, StepProgress, VideoEvent
from deployments.api.errors import ErrorBody
from deployments.requests.bodies import ImageBody, VideoBody

UNSEEN_MODELS: tuple[type[BaseModel], ...] = (
    ImageBody,
    VideoBody,
    PartialImage,
    CompletedImage,
    StepProgress,
    VideoEvent,
)
"""Bodies that routes read by themselves, and events: FastAPI does not see them."""
REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "A value is missing, unknown, or not allowed; `param` says which",
    401: "The API key is missing or not known",
    404: "There is no such model, clip or file",
    409: "The clip is not finished",
    410: "The file was there, and is gone",
    413: "The body is too large",
    415: "The content type is not supported",
    416: "The range lies beyond the file",
    429: "The queue is full; `Retry-After` says when to come back",
    502: "The ranks that worked on the request failed, twice",
    503: "The model is not ready, or the records of clips are away; `Retry-After` says when to come back",
    507: "There is no room on the server's disk",
}

Responses = dict[int | str, dict[str, Any]]


def error_documents(*statuses: int) -> Responses:
    return {status: {"model": ErrorBody, "description": ERRORS[status]} for status in statuses}


def body_document(model: type[BaseModel], *content_types: str) -> dict[str, Any]:
    """Returns what FastAPI cannot know of a route that reads its body by itself."""
    schema = {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}
    types = content_types or ("application/json",)
    return {"requestBody": {"required": True, "content": dict.fromkeys(types, schema)}}


def image_answers() -> Responses:
    """Returns the answer with pictures, in one JSON object or as events."""
    timing = {"description": "queue, encode, denoise, decode, total in ms", "schema": {"type": "string"}}
    warm = {"description": "whether the shape was prepared", "schema": {"type": "string", "enum": ["true", "false"]}}
    events = ("image_generation.partial_image", "image_generation.completed", "troupe.progress", "error")
    return {
        200: {
            "model": ImagesResponse,
            "description": "The pictures",
            "content": {"text/event-stream": event_schema(events)},
            "headers": {"Server-Timing": timing, "X-Troupe-Warm": warm},
        }
    }


def stream_answers() -> Responses:
    """Returns the answer with the events of a clip."""
    events = ("video.progress", "video.completed", "video.failed", "video.deleted", "error")
    return {200: {"description": "Events", "content": {"text/event-stream": event_schema(events)}}}


def event_schema(names: Sequence[str]) -> dict[str, Any]:
    """Returns one event of a stream, as OpenAPI 3.2 describes them: its data is JSON, with the name in ``type``."""
    properties = {
        "event": {"type": "string", "enum": list(names)},
        "data": {"type": "string", "contentMediaType": "application/json"},
    }
    return {"schema": {"type": "object", "properties": properties, "required": ["data"]}}


def file_answers(*content_types: str) -> Responses:
    """Returns the answers with a file, and with the part of it that a ``Range`` header asks for."""
    content = {key: {"schema": {"type": "string", "format": "binary"}} for key in content_types}
    whole, part = ({"description": text, "content": content} for text in ("The file", "A part of the file"))
    return {200: whole, 206: part}


def add_document(app: FastAPI) -> None:
    """Lets ``app`` serve a document that knows the bodies and the events, too."""

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
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # this API answers 400
    return document
