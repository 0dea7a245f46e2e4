"""From the keyword arguments of a Python handle to a request: the same fields and rules as the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.requests.bodies import ImageBody, VideoBody
from deployments.requests.clips import clip_request
from deployments.requests.errors import validated
from deployments.requests.images import image_request
from deployments.requests.rules import find_card
from deployments.studio.interface import ModelCard, Output
from pipelines.request import MediaRequest

NUM_PREVIEWS = 3


def handle_request(
    cards: Mapping[str, ModelCard], request_id: str, fields: Mapping[str, Any]
) -> tuple[MediaRequest, Output]:
    """Returns one picture or clip from the fields of ``POST /v1/images/generations`` or ``POST /v1/videos``.

    Without ``model``, the first served one. RequestError says which value is wrong and what is allowed.
    """
    card = find_card(cards, fields.get("model") or next(iter(cards)))
    fields = {**fields, "model": card.name}
    if card.defaults.kind == "video":
        clip = clip_request(validated(VideoBody, fields), cards, request_id, NUM_PREVIEWS)
        return clip.request, Output(format="mp4")
    pictures = image_request(validated(ImageBody, {**fields, "stream": True}), cards, request_id, max_n=1)
    return pictures.requests[0], pictures.output
