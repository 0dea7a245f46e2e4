"""POST /v1/images/generations and /v1/images/edits; and the files that their URLs point to."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse, JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from deployments.http.body import FORMS, JSON, read_json
from deployments.http.context import BEARER, ApiContext
from deployments.http.errors import ApiError
from deployments.http.idempotency import IdempotencyKey
from deployments.http.lookups import FILE_ID, find_file
from deployments.http.openapi_text import (
    EDIT_EVENTS,
    IMAGE_EVENTS,
    MAKING,
    body_document,
    error_documents,
    file_answers,
    image_answers,
)
from deployments.http.partial import ranged
from deployments.http.routes.batches import FileObject
from deployments.http.routes.drawing import draw
from deployments.http.uploads import read_upload
from deployments.requests.bodies import EditBody, ImageBody
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.rules import Requester


def image_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["images"])
    authorized, recognized = Depends(context.authorize), Depends(context.recognize)

    @router.post(
        "/v1/images/generations",
        responses=image_answers(*IMAGE_EVENTS) | error_documents(*MAKING, has_work=True),
        openapi_extra=body_document(ImageBody),
    )
    async def generate_images(
        request: Request, requester: Requester = authorized, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Make pictures from a prompt. With ``stream``, the answer is server-sent events instead of a JSON object."""
        body = await read_json(request, ImageBody)
        resolved = await context.resolved(body, "image", requester)
        return await draw(context, request, requester, resolved, idempotency_key)

    @router.post(
        "/v1/images/edits",
        responses=image_answers(*EDIT_EVENTS) | error_documents(*MAKING, has_work=True),
        openapi_extra=body_document(EditBody, JSON, *FORMS),
    )
    async def edit_images(
        request: Request, requester: Requester = authorized, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Make pictures from input pictures and a prompt. The model's defaults say which inputs it takes."""
        resolved = await read_upload(context, request, requester, EditBody, "image")
        if not resolved.pictures.pictures and resolved.pictures.control is None:
            message = "image is required: the picture to change; or control_image, of models that follow one"
            raise RequestError(message, "image", code="missing_field")
        return await draw(context, request, requester, resolved, idempotency_key)

    @router.get(
        "/v1/files/{name}",
        response_class=FileResponse,
        responses=file_answers("image/png", "image/jpeg", "image/webp") | error_documents(401, 404, 416, 503),
    )
    async def read_file(name: str, request: Request, requester: Requester = recognized) -> Response:
        """Return a picture made with ``response_format=url``, or the record of a file of ``POST /v1/files``."""
        if FILE_ID.fullmatch(name):
            requester = await context.authorize(request, await BEARER(request))
            return JSONResponse(FileObject.of(await find_file(context, requester, name)).model_dump())
        path = await asyncio.to_thread(context.files.find, name, context.viewer(requester) or None)
        if path is None:
            raise ApiError(404, f"There is no file {shown(name)}; files are kept for a limited time", param="name")
        media_type, headers = f"image/{path.suffix[1:]}", {"X-Content-Type-Options": "nosniff"}
        return ranged(path, media_type=media_type, headers=headers)

    return router
