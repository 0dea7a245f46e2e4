"""POST /v1/images/generations, at once or as a stream; and the files that its URLs point to."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse, JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.answers import Image, ImagesResponse, measures
from deployments.api.context import ApiContext
from deployments.api.disconnect import until_disconnect
from deployments.api.documents import body_document, error_documents, file_answers, image_answers
from deployments.api.errors import ApiError, shown
from deployments.api.event_stream import start_stream
from deployments.api.image_stream import image_events
from deployments.api.performing import collect, perform_all
from deployments.api.ranges import tame_range
from deployments.api.reading import read_json
from deployments.requests.bodies import ImageBody
from deployments.requests.images import ImagePlan, plan_images
from deployments.requests.rules import ready_card
from deployments.studio.interface import Media


def image_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["images"])

    @router.post(
        "/v1/images/generations",
        dependencies=[Depends(context.authorize)],
        responses=image_answers() | error_documents(400, 401, 404, 413, 415, 429, 502, 503),
        openapi_extra=body_document(ImageBody),
    )
    async def generate_images(request: Request) -> Response:
        """Draw pictures. With ``stream``, the answer is server-sent events instead of one JSON object."""
        body = await read_json(request, ImageBody)
        card = await ready_card(context.studio, body.model, "image")
        plan = plan_images(body, card, request.state.request_id, context.settings.max_images_per_request)
        events = perform_all(context.studio, plan.requests, plan.output)
        if body.stream:
            return await start_stream(image_events(plan, events), request.receive, context.settings)
        media = await until_disconnect(request.receive, collect(events, len(plan.requests)))
        images = await asyncio.to_thread(_hand_over, context, plan, media, files_url(context, request))
        answer = ImagesResponse(
            created=int(time.time()),
            data=images,
            output_format=plan.output.format,
            size=plan.size,
            safety_identifier=plan.safety_identifier,
        )
        return JSONResponse(answer.model_dump(), headers=measures(media))

    @router.get(
        "/v1/files/{name}",
        response_class=FileResponse,
        responses=file_answers("image/png", "image/jpeg", "image/webp") | error_documents(404, 416),
    )
    async def read_file(name: str, request: Request) -> Response:
        """A picture made with ``response_format=url``. Its name is the secret; it is gone after a while."""
        path = await asyncio.to_thread(context.files.find, name)
        if path is None:
            raise ApiError(404, f"There is no file {shown(name)}; files are kept for a limited time", param="name")
        tame_range(request.scope, path.stat().st_size)
        return FileResponse(path, media_type=f"image/{path.suffix[1:]}", headers={"X-Content-Type-Options": "nosniff"})

    return router


def files_url(context: ApiContext, request: Request) -> str:
    base = context.settings.public_url or str(request.base_url)
    return f"{base.rstrip('/')}/v1/files"


def _hand_over(context: ApiContext, plan: ImagePlan, media: list[Media], base_url: str) -> list[Image]:
    if not plan.by_url:
        return [Image(b64_json=b64encode(one.data).decode(), seed=one.seed) for one in media]
    names = [context.files.put(one.data, one.format) for one in media]
    return [Image(url=f"{base_url}/{name}", seed=one.seed) for name, one in zip(names, media, strict=True)]
