"""From the keyword arguments of a Python handle to a request: the same fields and rules as the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from deployments.requests.bodies import EditBody, VideoBody
from deployments.requests.cards import Needs, choose_card, find_card
from deployments.requests.clips import clip_request
from deployments.requests.errors import NOTHING, RequestError, shown, validated
from deployments.requests.extra import unfolded
from deployments.requests.images import image_request
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.unpack import unpack
from deployments.requests.rules import brought_along
from deployments.studio.interface import ModelCard, Output
from pipelines.request import InputPictures, MediaKind, MediaRequest

NUM_PREVIEWS = 3
DEFAULT_LIMITS = PictureLimits()
KINDS_BY_FIELD: Mapping[str, MediaKind] = {"image": "image", "images": "image", "input_reference": "video"}
"""What is made of pictures, by the field that they come in."""


def handle_request(
    cards: Mapping[str, ModelCard], request_id: str, fields: Mapping[str, Any], limits: PictureLimits = DEFAULT_LIMITS
) -> tuple[MediaRequest, Output, InputPictures]:
    """Returns one picture or clip from the fields of ``POST /v1/images/edits`` or ``POST /v1/videos``.

    ``kind``, image or video, says which; without it, it is the model's own. Without ``model``, the first served one,
    of that kind, and for the pictures that come along. These are bytes of files, or data URLs; to unpack them takes
    time.
    RequestError says which value is wrong and what is allowed.
    """
    fields = dict(unfolded(fields))
    card = card_for(cards, fields.get("model"), fields.pop("kind", None), fields)
    fields["model"] = fields.get("model") or card.name
    if card.defaults.kind == "video":
        video = validated(VideoBody, fields)
        clip = clip_request(video, cards, request_id, NUM_PREVIEWS, unpack(brought_along(video, card), limits))
        return clip.request, Output(format="mp4"), clip.pictures
    body = validated(EditBody, {**fields, "stream": True})
    inputs = unpack(brought_along(body, card), limits)
    pictures = image_request(body, cards, request_id, max_n=1, pictures=inputs)
    return pictures.requests[0], pictures.output, inputs


def card_for(cards: Mapping[str, ModelCard], model: Any, kind: Any, fields: Mapping[str, Any] = NOTHING) -> ModelCard:
    """Returns the card of the model asked for, with the defaults of ``kind``, by default its own.

    Without both, the names of the pictures in ``fields`` say what is made of them.
    """
    if kind is None and not model and (named := [one for one in KINDS_BY_FIELD if fields.get(one) is not None]):
        kind = KINDS_BY_FIELD[named[0]]
    if kind is None:
        return find_card(cards, model or next(iter(cards)))
    if kind not in get_args(MediaKind):
        raise RequestError(f"kind is {shown(kind)}; it must be {' or '.join(get_args(MediaKind))}", "kind")
    return choose_card(cards, model or None, kind, needs_of_fields(fields))


def needs_of_fields(fields: Mapping[str, Any]) -> Needs:
    """Returns what ``needs_of`` does, of fields that nobody has checked yet."""
    pictures = [fields[name] for name in KINDS_BY_FIELD if fields.get(name) is not None]
    return Needs(
        num_pictures=sum(len(one) if isinstance(one, list | tuple) else 1 for one in pictures),
        has_mask=fields.get("mask") is not None,
        strength=fields.get("strength"),
        num_layers=fields.get("layers"),
    )
