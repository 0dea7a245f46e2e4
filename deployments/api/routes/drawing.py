"""Pictures that are drawn for one request, at once or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from pybase64 import b64encode_as_string
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.answers import (
    CompletedEdit,
    CompletedImage,
    CompletedPicture,
    Image,
    ImagesResponse,
    PartialEdit,
    PartialImage,
    PartialPicture,
    QueuedPicture,
    StepProgress,
)
from deployments.api.context import ApiContext
from deployments.api.errors import from_failure
from deployments.api.guards.hosts import base_url
from deployments.api.idempotency import REPLAYED
from deployments.api.measures import ETA_HEADER, Indexed, SpentSeconds, eta_header, measures
from deployments.api.streams import Event, start_stream, until_disconnect
from deployments.asyncio_tools import merge
from deployments.requests.bodies import ImageBody
from deployments.requests.images import ImageRequest
from deployments.requests.rules import ResolvedRequest
from deployments.studio.interface import Media, Preview, Progress, Queued, StudioEvent


async def draw_once(
    context: ApiContext, request: Request, resolved: ResolvedRequest[ImageBody], idempotency_key: str | None
) -> Response:
    """Return the answer of ``draw``, or its earlier answer to the same request. A stream is drawn anew."""
    key = None if resolved.body.stream else idempotency_key
    async with context.known.turn(request, key, resolved.body) as turn:
        if turn.answer is not None:
            return Response(turn.answer, media_type="application/json", headers=dict(REPLAYED))
        response = await draw(context, request, resolved)
        await context.known.keep(turn, bytes(response.body) if turn.file is not None else b"")
        return response


async def draw(context: ApiContext, request: Request, resolved: ResolvedRequest[ImageBody]) -> Response:
    """Return what ``resolved`` asks for: one JSON object, or a stream of events."""
    settings, requester = context.settings, context.requester(request)
    limits = context.accounts.limits_of(requester.key)
    max_n = min(settings.max_images_per_request, limits.max_concurrent or settings.max_images_per_request)
    pictures = ImageRequest.of(resolved, requester, max_n)
    gang_in_s = await context.check_ready(resolved.card.name)
    events = perform_all(context, pictures, request.state, gang_in_s)
    if pictures.body.stream:
        headers: dict[str, str] = {}
        return await start_stream(image_events(pictures, events, headers), request.receive, settings, headers)
    media = await until_disconnect(request.receive, collect(events, len(pictures.requests)))
    body_json = await asyncio.to_thread(_answer_json, context, pictures, media, request)  # megabytes: others would wait
    headers = measures([one.timings for one in media], pictures.first.cache)
    return Response(body_json, media_type="application/json", headers=headers)


def files_url(context: ApiContext, request: Request) -> str:
    return f"{base_url(request, context.settings)}/v1/files"


def _answer_json(context: ApiContext, pictures: ImageRequest, media: list[Media], request: Request) -> bytes:
    answer = ImagesResponse(
        created=int(time.time()),
        data=_hand_over(context, pictures, media, request),
        output_format=pictures.output.format,
        size=pictures.size,
        background="transparent" if pictures.first.num_layers else "opaque",
        quality=pictures.quality,
        num_inference_steps=pictures.first.num_inference_steps,
        cache=pictures.first.cache,
        safety_identifier=pictures.safety_identifier,
    )
    return to_json(answer)


def _hand_over(context: ApiContext, pictures: ImageRequest, media: list[Media], request: Request) -> list[Image]:
    files = [(data, layer, one) for one in media for layer, data in _layers(pictures, one)]
    if pictures.body.response_format != "url":
        return [Image(b64_json=b64encode_as_string(data), seed=one.seed, layer=layer) for data, layer, one in files]
    names = [context.files.put(data, one.format, request.state.key_hash) for data, _, one in files]
    url, named = files_url(context, request), zip(names, files, strict=True)
    return [Image(url=f"{url}/{name}", seed=one.seed, layer=layer) for name, (_, layer, one) in named]


def _layers(pictures: ImageRequest, media: Media) -> list[tuple[int | None, bytes]]:
    """Returns the files of one picture, each with the number of its layer."""
    return list(enumerate(media.files)) if pictures.first.num_layers else [(None, media.data)]


async def perform_all(
    context: ApiContext, pictures: ImageRequest, state: State, gang_in_s: float
) -> AsyncGenerator[Indexed]:
    """Yield the events of all pictures, which are made side by side, within the limits of the key and the server.

    Closing this closes every ``perform``, and so does the first one that fails: what it raised is raised here, as an
    ApiError if it has a meaning for clients. Nothing is made for ``gang_in_s``. LimitReachedError,
    AccountsUnavailableError or ApiError if the limits do not allow it.
    """
    num, spent = len(pictures.requests), SpentSeconds(state)
    async with context.key_limits.taken(state.key_hash, num):
        with (
            context.admission.taken(pictures.first.model, num, pictures.pictures.num_bytes, gang_in_s),
            _answers_for_failures(),
        ):
            performed = (context.studio.perform(one, pictures.output, pictures.pictures) for one in pictures.requests)
            streams = [_indexed(index, events) for index, events in enumerate(performed)]
            async with aclosing(merge(*streams)) as merged:
                async for index, event in merged:
                    spent.update(index, event)
                    yield index, event


@contextmanager
def _answers_for_failures() -> Iterator[None]:
    """Raise what fails inside the block as an ApiError, if it has a meaning for clients."""
    try:
        yield
    except Exception as failure:
        answer = from_failure(failure)
        if answer is None:
            raise
        raise answer from failure


async def _indexed(index: int, events: AsyncGenerator[StudioEvent]) -> AsyncGenerator[Indexed]:
    async with aclosing(events):
        async for event in events:
            yield index, event


async def collect(events: AsyncGenerator[Indexed], num_media: int) -> list[Media]:
    """Returns the finished media of ``perform_all``, in the order of the requests."""
    media: dict[int, Media] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Media):
                media[index] = event
    assert len(media) == num_media, f"{num_media} requests gave {len(media)} media"
    return [media[index] for index in range(num_media)]


async def image_events(
    pictures: ImageRequest, events: AsyncGenerator[Indexed], headers: dict[str, str]
) -> AsyncGenerator[Event, None]:
    """Yields what the client is told: previews, finished pictures and, if asked for, places in the queue and steps.

    What is predicted for them, if it is for all, goes into ``headers``, which are sent with the first event. So nothing
    is told of the queue before every picture has its place.
    """
    places: list[Indexed] = []
    async with aclosing(events):
        async for index, event in events:
            told = [(index, event)]
            if isinstance(event, Queued):
                places.append((index, event))
                headers.pop(ETA_HEADER, None)
                headers.update(eta_header([place.eta_s for _, place in places if isinstance(place, Queued)]))
                told = _told_places(places, len(pictures.requests))
            for one in told:
                for news in translate(pictures, *one):
                    yield news


def _told_places(places: list[Indexed], num: int) -> list[Indexed]:
    """Returns the places to tell of now: all once there are ``num``, then each new one, as after a lost gang."""
    return places if len(places) == num else places[num:][-1:]


def translate(pictures: ImageRequest, index: int, event: StudioEvent) -> Sequence[Event]:
    match event:
        case Queued() if pictures.body.stream_progress:
            return [QueuedPicture(image_index=index, num_before=event.num_before, eta_s=event.eta_s)]
        case Media():
            return [_completed(pictures, index, event, layer, data) for layer, data in _layers(pictures, event)]
        case Preview():
            return [_partial(pictures, index, event)]
        case Progress() if pictures.body.stream_progress:
            return [StepProgress(image_index=index, step=event.step, of=event.num_steps, eta_s=event.eta_s)]
    return ()


def _completed(pictures: ImageRequest, index: int, media: Media, layer: int | None, data: bytes) -> CompletedPicture:
    completed = CompletedEdit if pictures.is_edit else CompletedImage
    return completed(
        b64_json=b64encode_as_string(data),
        created_at=int(time.time()),
        output_format=media.format,
        size=pictures.size,
        background="opaque" if layer is None else "transparent",
        quality=pictures.quality or "auto",
        num_inference_steps=pictures.first.num_inference_steps,
        cache=pictures.first.cache,
        safety_identifier=pictures.safety_identifier,
        image_index=index,
        layer=layer,
        seed=media.seed,
        timings=media.timings,
    )


def _partial(pictures: ImageRequest, index: int, preview: Preview) -> PartialPicture:
    partial = PartialEdit if pictures.is_edit else PartialImage
    return partial(
        b64_json=b64encode_as_string(preview.data),
        partial_image_index=preview.index,
        created_at=int(time.time()),
        size=pictures.size,
        quality=pictures.quality or "auto",
        image_index=index,
        step=preview.step,
    )
