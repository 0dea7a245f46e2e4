"""Pictures that are drawn for one request, at once or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pybase64 import b64encode_as_string
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.asyncio_tools import merge
from deployments.http.answers import (
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
from deployments.http.context import ApiContext
from deployments.http.errors import answer_to
from deployments.http.hosts import base_url
from deployments.http.idempotency import REPLAYED, Turn
from deployments.http.measures import SpentSeconds, enhancer_header, eta_header, measures
from deployments.http.streams import STREAM_HEADERS, ClientGoneError, Event, start_stream, until_disconnect
from deployments.requests.bodies import ImageBody
from deployments.requests.images import ImageRequest
from deployments.requests.rules import Requester, ResolvedRequest
from deployments.service.interface import Media, Preview, Progress, Queued, ServiceEvent


async def draw(
    context: ApiContext,
    request: Request,
    requester: Requester,
    resolved: ResolvedRequest[ImageBody],
    idempotency_key: str | None,
) -> Response:
    """Return what ``resolved`` asks for: one JSON object, or a stream of events.

    The JSON object is the earlier one, if the same request with the same ``idempotency_key`` came before. The stream
    then has the events of the finished pictures alone.
    """
    limit = context.settings.max_images_per_request
    async with AsyncExitStack() as stack:
        known = context.known.turn(request.url.path, requester, idempotency_key, resolved.body)
        turn = await stack.enter_async_context(known)
        if turn.answer is not None:
            return _replayed(turn.answer, is_stream=bool(resolved.body.stream))
        max_n = min(limit, context.accounts.limits_of(requester.key).max_concurrent or limit)
        pictures = ImageRequest.of(resolved, requester, max_n)
        gang_in_s = await context.check_ready(resolved.card.name)
        if pictures.first.enhance_prompt:
            context.admission.check_place(pictures.first.model, gang_in_s)
            enhanced = await context.enhanced(request, pictures.first, len(pictures.requests))
            pictures = pictures.with_prompt_of(enhanced)
        drawing = Drawing(
            context=context, pictures=pictures, request_id=requester.request_id, gang_in_s=gang_in_s, turn=turn
        )
        if pictures.body.stream:
            events, receive = drawing.events(), request.receive
            stream = await start_stream(events, receive, context.settings, lambda: drawing.headers)
            stream.at_end = stack.pop_all()
            return stream
        with drawing.failures():
            media = await until_disconnect(request.receive, drawing.media())
            # In a thread: megabytes, for which others would wait.
            answer = await asyncio.to_thread(_answer_json, context, pictures, media, request)
        await context.known.keep(turn, answer)
    headers = measures([one.timings for one in media], pictures.first.cache) | enhancer_header(pictures.first)
    return Response(answer, media_type="application/json", headers=headers)


def _replayed(answer: bytes, *, is_stream: bool) -> Response:
    """Return an earlier answer: one JSON object, or the last events of a stream."""
    if is_stream:
        return Response(answer, media_type="text/event-stream", headers={**STREAM_HEADERS, **REPLAYED})
    return Response(answer, media_type="application/json", headers=dict(REPLAYED))


@dataclass(kw_only=True, slots=True)
class Drawing:
    """The pictures of one request while they are made."""

    context: ApiContext
    """Services and settings that all routes share."""
    pictures: ImageRequest
    """Request for the pictures."""
    request_id: str
    """Id of the HTTP request, for logs and errors."""
    gang_in_s: float
    """Seconds until a gang begins new work."""
    turn: Turn = field(default_factory=Turn)
    """Under which the last events of a stream are kept."""
    _spent: SpentSeconds = field(default_factory=SpentSeconds, init=False)
    """GPU seconds of its pictures."""
    _queued: list[tuple[int, Queued]] = field(default_factory=list, init=False)
    """Places in queues by picture, in the order of their events."""
    _finished: list[bytes] = field(default_factory=list, init=False)
    """The last events of each finished picture, encoded."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a stream: the prompt enhancer's, and when all pictures are done, if that is predicted."""
        return eta_header([queued.eta_s for _, queued in self._queued]) | enhancer_header(self.pictures.first)

    async def media(self) -> list[Media]:
        """Return the finished pictures, in the order of the requests."""
        media: dict[int, Media] = {}
        async with self._performed() as performed:
            async for index, event in performed:
                self._spent.update(index, event)
                if isinstance(event, Media):
                    media[index] = event
        num = len(self.pictures.requests)
        assert len(media) == num, f"{num} requests gave {len(media)} media"
        return [media[index] for index in range(num)]

    async def events(self) -> AsyncGenerator[Event]:
        """Yield previews, finished pictures and, if the client asks for them, places in the queue and steps."""
        with self.failures():
            async with self._performed() as performed:
                async for index, event in performed:
                    self._spent.update(index, event)
                    translated = self._translated(index, event)
                    if isinstance(event, Media) and self.turn.name:
                        await self._keep(translated)
                    for one in translated:
                        yield one

    async def _keep(self, last: Sequence[Event]) -> None:
        """Take the last events of a picture; keep those of all before the client has the last ones."""
        self._finished.append(await asyncio.to_thread(lambda: b"".join(event.encode() for event in last)))
        if len(self._finished) == len(self.pictures.requests):
            await self.context.known.keep(self.turn, b"".join(self._finished))

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise what fails inside the block as an ApiError, which tells the GPU-seconds that were spent."""
        try:
            yield
        except ClientGoneError:
            raise
        except Exception as failure:
            answer = answer_to(failure, self.request_id)
            answer.headers |= self._spent.header
            raise answer from failure

    @asynccontextmanager
    async def _performed(self) -> AsyncIterator[AsyncIterator[tuple[int, ServiceEvent]]]:
        """Yield the events of all pictures, which are made side by side, each with its index.

        At the end of the block all are closed. The first failure is raised. LimitReachedError, AccountsUnavailableError
        or ApiError if the limits of the key or the server do not allow them.
        """
        service, pictures, first = self.context.service, self.pictures, self.pictures.first
        num, num_bytes = len(pictures.requests), pictures.pictures.num_bytes
        async with self.context.key_limits.taken(first.key, num):
            with self.context.admission.taken(first.model, num, num_bytes, self.gang_in_s):
                performed = (service.perform(one, pictures.output, pictures.pictures) for one in pictures.requests)
                async with aclosing(merge(*performed)) as events:
                    yield events

    def _translated(self, index: int, event: ServiceEvent) -> list[Event]:
        """Return the events of the API for one of the picture ``index``."""
        pictures, wants_progress = self.pictures, self.pictures.body.stream_progress
        match event:
            case Queued():
                self._queued.append((index, event))
                return self._queue_events() if wants_progress else []
            case Media():
                return [_completed(pictures, index, event, layer, data) for layer, data in _layers(pictures, event)]
            case Preview():
                return [_partial(pictures, index, event)]
            case Progress() if wants_progress:
                return [StepProgress.of_picture(index, event)]
        return []

    def _queue_events(self) -> list[Event]:
        """Return the newest place in a queue; all places at once when the last picture gets its first.

        So ``headers`` are complete when the first event is sent.
        """
        num = len(self.pictures.requests)
        places = self._queued if len(self._queued) == num else self._queued[num:][-1:]
        return [
            QueuedPicture(image_index=index, num_before=queued.num_before, eta_s=queued.eta_s)
            for index, queued in places
        ]


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
    revised = pictures.first.revised_prompt
    images = [Image(revised_prompt=revised, seed=one.seed, layer=layer) for _, layer, one in files]
    if pictures.body.response_format != "url":
        return [
            image.model_copy(update={"b64_json": b64encode_as_string(data)})
            for image, (data, *_) in zip(images, files, strict=True)
        ]
    names = [context.files.put(data, one.format, pictures.first.key) for data, _, one in files]
    url = files_url(context, request)
    return [
        image.model_copy(update={"url": context.files.url(name, url)})
        for image, name in zip(images, names, strict=True)
    ]


def _layers(pictures: ImageRequest, media: Media) -> list[tuple[int | None, bytes]]:
    """Return the files of one picture, each with its layer number."""
    return list(enumerate(media.files)) if pictures.first.num_layers else [(None, media.data)]


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
        revised_prompt=pictures.first.revised_prompt,
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
