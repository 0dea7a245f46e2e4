"""The pictures of one request: what the service makes, and how the client gets them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deployments.requests.bodies import EditBody, ImageBody
from deployments.requests.fields import MAX_SEED, Quality
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import QUALITIES, Requester, RequestRules, ResolvedRequest
from deployments.service.interface import Output
from pipelines.request import InputPictures, MediaRequest
from pipelines.size import MAX_SIDES


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """One or several pictures."""

    body: ImageBody
    """The checked body."""
    requests: tuple[MediaRequest, ...]
    """One request per picture, with consecutive seeds."""
    pictures: InputPictures
    """Input pictures of each request."""
    output: Output
    """Format of the files."""
    quality: Quality | None
    """The quality that decided the steps; None if the client gave their number."""

    @classmethod
    def of(cls, resolved: ResolvedRequest[ImageBody], requester: Requester, max_n: int) -> ImageRequest:
        """Return what ``resolved`` asks for. RequestError if a value does not suit the model or another value."""
        body = resolved.body
        n = 1 if body.n is None else body.n
        if not 1 <= n <= max_n:
            raise RequestError(f"n is {n}; it must be from 1 to {max_n}", "n")
        check_stream_fields(body)
        first = RequestRules(resolved.card).check(body, resolved.pictures, requester, body.partial_images or 0)
        check_seeds(first.seed, n)
        rest = (replace(first, request_id=f"{first.request_id}-{i}", seed=first.seed + i) for i in range(1, n))
        return cls(
            body=body,
            requests=(first, *rest),
            pictures=resolved.pictures,
            output=image_output(body, first),
            quality=decisive_quality(body, resolved.card.qualities),
        )

    @property
    def first(self) -> MediaRequest:
        """The request of the first picture: the others differ from it in their seed and id."""
        return self.requests[0]

    def with_prompt_of(self, first: MediaRequest) -> ImageRequest:
        """Return the same pictures with the prompt of ``first``, which was rewritten for all of them."""
        changes = {name: getattr(first, name) for name in ("prompt", "given_prompt", "enhancer_outcome", "waited_s")}
        return replace(self, requests=tuple(replace(one, **changes) for one in self.requests))

    @property
    def is_edit(self) -> bool:
        """True for the route of edits, whose events have names of their own."""
        return isinstance(self.body, EditBody)

    @property
    def safety_identifier(self) -> str | None:
        return self.body.safety_identifier or self.body.user or None

    @property
    def size(self) -> str:
        return f"{self.first.width}x{self.first.height}"


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


def decisive_quality(body: ImageBody, qualities: Mapping[Quality, str]) -> Quality | None:
    """Return the quality that decided the steps; ``qualities`` are those that stand for a recipe."""
    quality = QUALITIES[body.quality or "auto"]
    if body.recipe is None and body.quality is not None and quality in qualities:
        return quality
    is_given = body.num_inference_steps is not None or bool(body.sigmas or body.timesteps)
    return None if is_given else quality


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
    compression = 100 if body.output_compression is None else body.output_compression
    if image_format == "png" and compression != 100:
        message = f"output_compression is {compression}, but png is lossless; set output_format to jpeg or webp"
        raise RequestError(message, "output_compression")
    return Output(format=image_format, compression=compression)
