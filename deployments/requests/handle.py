"""Requests from the keyword arguments of a Python handle: the same fields and rules as the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.images import ImageRequest
from deployments.requests.model_choice import Needs, choose_card, find_card
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.unpack import unpack
from deployments.requests.recipe_choice import with_recipe
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.rules import NUM_PREVIEWS, Requester, RequestRules, ResolvedRequest
from deployments.requests.validation import NOTHING, unfolded, validated
from deployments.service.interface import ModelCard, Output
from pipelines.request import InputPictures, MediaKind, MediaRequest

DEFAULT_LIMITS = PictureLimits()
KINDS_BY_FIELD: Mapping[str, MediaKind] = {
    "image": "image",
    "images": "image",
    "control_image": "image",
    "input_reference": "video",
    "video": "video",
    "reference_video": "video",
}
"""The kind that is made of pictures and clips, by their field."""
PICTURES, VIDEOS = ("image", "images", "input_reference"), ("video", "reference_video")
"""Fields whose pictures and clips are counted."""


def handle_request(
    cards: Mapping[str, ModelCard], request_id: str, fields: Mapping[str, Any], limits: PictureLimits = DEFAULT_LIMITS
) -> tuple[MediaRequest, Output, InputPictures]:
    """Return one picture or clip from the fields of ``POST /v1/images/edits`` or ``POST /v1/videos``.

    ``kind``, image or video, tells the two apart; its default is the model's own kind. Without ``model``, it is the
    first served model of that kind that takes the inputs: bytes of files, or data URLs.
    RequestError names the wrong value and what is allowed. Decoding pictures takes time: not for an event loop.
    """
    fields, requester = dict(unfolded(fields)), Requester(request_id=request_id)
    card = card_for(cards, fields.get("model"), fields.pop("kind", None), fields)
    rules, fields["model"] = RequestRules(card), fields.get("model") or card.name
    if card.defaults.kind == "video":
        video = with_recipe(validated(VideoBody, fields), card)
        if video.webhook is not None:
            raise RequestError("webhook has no effect here: a handle hears of the end itself; leave it out", "webhook")
        pictures = grounded(video, unpack(rules.check_sources(video), limits, partial(rules.video_form, video)))
        return rules.check(video, pictures, requester, NUM_PREVIEWS), Output(format="mp4"), pictures
    body = with_recipe(validated(EditBody, {**fields, "stream": True}), card)
    pictures = grounded(body, unpack(rules.check_sources(body), limits))
    images = ImageRequest.of(ResolvedRequest(card=card, body=body, pictures=pictures), requester, max_n=1)
    return images.first, images.output, pictures


def grounded(body: MediaBody, pictures: InputPictures) -> InputPictures:
    """Return ``pictures`` over the colour that ``body`` names, if any."""
    return pictures if body.ground is None else pictures.over(body.ground)


def card_for(cards: Mapping[str, ModelCard], model: Any, kind: Any, fields: Mapping[str, Any] = NOTHING) -> ModelCard:
    """Return the card of ``model``, with the defaults of ``kind``, by default the model's own.

    Without both, the names of the pictures in ``fields`` decide the kind.
    """
    if kind is None and not model and (named := [one for one in KINDS_BY_FIELD if fields.get(one) is not None]):
        kind = KINDS_BY_FIELD[named[0]]
    if kind is None:
        return find_card(cards, model or next(iter(cards)))
    if kind not in get_args(MediaKind):
        raise RequestError(f"kind is {shown(kind)}; it must be {' or '.join(get_args(MediaKind))}", "kind")
    return choose_card(cards, model or None, kind, needs_of_fields(fields))


def needs_of_fields(fields: Mapping[str, Any]) -> Needs:
    """Like ``Needs.of``, for fields that are not checked yet."""
    num_pictures, num_videos = (
        sum(len(one) if isinstance(one, list | tuple) else 1 for name in names if (one := fields.get(name)) is not None)
        for names in (PICTURES, VIDEOS)
    )
    return Needs(
        num_pictures=num_pictures,
        has_mask=fields.get("mask") is not None,
        strength=fields.get("strength"),
        num_layers=fields.get("layers"),
        has_video=num_videos > 0,
        num_videos=num_videos,
        keeps_audio=fields.get("keep_audio") is True,
        has_lora=bool(fields.get("lora") or fields.get("recipe")),
        has_control=fields.get("control_image") is not None,
        has_frame_indices=fields.get("frame_indices") is not None,
    )
