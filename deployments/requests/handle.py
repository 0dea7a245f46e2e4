"""From the keyword arguments of a Python handle to a request: the same fields and rules as the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from deployments.api.errors import ApiError, from_pydantic
from deployments.requests.bodies import ImageBody, VideoBody
from deployments.requests.images import plan_images
from deployments.requests.rules import clip_length, media_request, no_model
from deployments.studio.interface import ModelCard, Output
from pipelines.request import MediaRequest

NUM_PREVIEWS = 3


def plan_generate(
    cards: Mapping[str, ModelCard], request_id: str, fields: Mapping[str, Any]
) -> tuple[MediaRequest, Output]:
    """One picture or clip from the fields of ``POST /v1/images/generations`` or ``POST /v1/videos``.

    Without ``model``, the first served one. ValueError says which value is wrong and what is allowed.
    """
    try:
        return _plan(cards, request_id, fields)
    except ApiError as error:
        raise ValueError(error.message) from None


def _plan(cards: Mapping[str, ModelCard], request_id: str, fields: Mapping[str, Any]) -> tuple[MediaRequest, Output]:
    name = fields.get("model") or next(iter(cards))
    if not isinstance(name, str) or name not in cards:
        raise no_model(name, cards)
    plan = _plan_clip if cards[name].defaults.kind == "video" else _plan_picture
    return plan(cards[name], request_id, fields)


def _plan_picture(card: ModelCard, request_id: str, fields: Mapping[str, Any]) -> tuple[MediaRequest, Output]:
    plan = plan_images(_validated(ImageBody, {**fields, "stream": True}), card, request_id, max_n=1)
    return plan.requests[0], plan.output


def _plan_clip(card: ModelCard, request_id: str, fields: Mapping[str, Any]) -> tuple[MediaRequest, Output]:
    body = _validated(VideoBody, fields)
    num_frames, fps = clip_length(body.seconds, body.num_frames, body.fps, card.defaults)
    request = media_request(body, card, request_id, num_frames=num_frames, fps=fps, num_previews=NUM_PREVIEWS)
    return request, Output(format="mp4")


B = TypeVar("B", ImageBody, VideoBody)


def _validated(body_type: type[B], fields: Mapping[str, Any]) -> B:
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise from_pydantic(error.errors(), list(body_type.model_fields)) from None
