"""From the body of an image request to what the studio is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deployments.requests.bodies import EditBody, ImageBody
from deployments.requests.cards import choose_card
from deployments.requests.errors import RequestError
from deployments.requests.fields import MAX_SEED
from deployments.requests.quality import MEANINGS, Quality
from deployments.requests.rules import media_request, needs_of
from deployments.studio.interface import ModelCard, Output
from pipelines.caching import CacheMode
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest
from pipelines.size import MAX_SIDES


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """One request per picture, with seeds that follow each other, and how to hand the pictures over.

    ``pictures`` go with each of them. ``quality`` is what the number of steps was chosen by; None if the client said
    the number. ``is_edit``: it came by the route for edits, whose events have names of their own.
    """

    requests: tuple[MediaRequest, ...]
    pictures: InputPictures
    is_edit: bool
    output: Output
    by_url: bool
    stream_progress: bool
    quality: Quality | None
    safety_identifier: str | None

    def of_key(self, key: str, weight: float, waited_s: float) -> ImageRequest:
        """Returns the same, asked for ``waited_s`` ago with the API key of that hash, which has that weight."""
        asked = (replace(request, key=key, weight=weight, waited_s=waited_s) for request in self.requests)
        return replace(self, requests=tuple(asked))

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def num_inference_steps(self) -> int:
        return self.requests[0].num_inference_steps

    @property
    def cache(self) -> CacheMode:
        return self.requests[0].cache

    @property
    def num_layers(self) -> int:
        return self.requests[0].num_layers

    @property
    def num_input_bytes(self) -> int:
        """What the pictures, and a mask, take in memory."""
        mask = () if self.pictures.mask is None else (self.pictures.mask,)
        return sum(len(picture.data) for picture in (*self.pictures.pictures, *mask))

    @property
    def size(self) -> str:
        return f"{self.requests[0].width}x{self.requests[0].height}"


def image_request(
    body: ImageBody,
    cards: Mapping[str, ModelCard],
    request_id: str,
    max_n: int,
    pictures: InputPictures = NO_PICTURES,
) -> ImageRequest:
    """Returns what ``body`` asks for. RequestError if a value does not suit the model or another value.

    ``pictures`` are those that came along.
    """
    card = choose_card(cards, body.model, "image", needs_of(body))
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_n:
        raise RequestError(f"n is {n}; it must be from 1 to {max_n}", "n")
    check_stream_fields(body)
    first = media_request(body, card, request_id, pictures, num_previews=body.partial_images or 0)
    check_seeds(first.seed, n)
    rest = (replace(first, request_id=f"{first.request_id}-{i}", seed=first.seed + i) for i in range(1, n))
    return ImageRequest(
        requests=(first, *rest),
        pictures=pictures,
        is_edit=isinstance(body, EditBody),
        output=image_output(body, first),
        by_url=body.response_format == "url",
        stream_progress=bool(body.stream_progress),
        quality=MEANINGS[body.quality or "auto"] if body.num_inference_steps is None else None,
        safety_identifier=body.safety_identifier or body.user or None,
    )


def check_stream_fields(body: ImageBody) -> None:
    if body.stream:
        if body.response_format == "url":
            message = "response_format is url; a stream carries pictures as b64_json only"
            raise RequestError(message, "response_format")
        return
    for name in ("partial_images", "stream_progress"):
        if getattr(body, name):
            raise RequestError(f"{name} has no effect without stream; set stream to true", name)


def check_seeds(seed: int, n: int) -> None:
    if seed + n - 1 > MAX_SEED:
        raise RequestError(f"seed is {seed} and n is {n}: seed + n - 1 must be at most {MAX_SEED}", "seed")


def image_output(body: ImageBody, request: MediaRequest) -> Output:
    image_format = body.output_format or "png"
    if max(request.width, request.height) > (longest := MAX_SIDES.get(image_format, math.inf)):
        message = (
            f"output_format is {image_format}, which holds at most {longest} pixels a side, and the size is "
            f"{request.width}x{request.height}; make it smaller, or set output_format to png"
        )
        raise RequestError(message, "output_format")
    if request.num_layers and image_format == "jpeg":
        message = (
            "output_format is jpeg, which knows no transparency, and layers are transparent; set it to png or webp"
        )
        raise RequestError(message, "output_format")
    if request.num_layers and body.background == "opaque":
        raise RequestError("background is opaque, but layers are transparent; leave it out", "background")
    compression = 100 if body.output_compression is None else body.output_compression
    if image_format == "png" and compression != 100:
        message = f"output_compression is {compression}, but png is lossless; set output_format to jpeg or webp"
        raise RequestError(message, "output_compression")
    return Output(format=image_format, compression=compression)
