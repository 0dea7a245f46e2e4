"""Rules that depend on the model: from a checked body and a model's card to the frozen requests for the studio."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.cards import Needs
from deployments.requests.errors import RequestError, blaming, shown
from deployments.requests.fields import BLANK, RANDOM_SEED
from deployments.requests.loras import choose_loras
from deployments.requests.pictures.sources import Sources
from deployments.requests.quality import MEANINGS, quality_steps
from deployments.requests.sizes import choose_size
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest, ServiceTier

RANDOM_SEED_BITS = 32
TIERS: Mapping[str, ServiceTier] = {"auto": "default", "default": "default", "flex": "flex", "priority": "priority"}
"""What clients may write, as OpenAI has it, and what it means."""


def brought_along(body: MediaBody, card: ModelCard) -> Sources:
    """Returns the pictures of ``body``, still packed. RequestError for more, or other, than the model takes."""
    sources, number = sources_of(body), len(sources_of(body).pictures)
    if not body.picture_fields and card.defaults.min_pictures:
        raise RequestError(f"{card.name} changes pictures: send them along, to POST /v1/images/edits", "model")
    with blaming(sources.param):
        card.defaults.request(num_pictures=number)
    has_mask = sources.mask is not None
    with blaming("mask"):
        card.defaults.request(num_pictures=number, has_mask=has_mask)
    num_steps = choose_steps(body, card.defaults)
    with blaming("strength"):
        strength = strength_of(body)
        card.defaults.request(num_pictures=number, has_mask=has_mask, strength=strength, num_inference_steps=num_steps)
    return sources


def sources_of(body: MediaBody) -> Sources:
    """Returns the pictures of ``body`` in their order, whatever the model takes."""
    match body:
        case EditBody():
            return Sources(param="image", pictures=(body.image or ()) + (body.images or ()), mask=body.mask)
        case VideoBody():
            return Sources(param="input_reference", pictures=body.input_reference or ())
    return Sources(param="model")


def needs_of(body: MediaBody) -> Needs:
    """Returns what decides which model ``body`` is for, where it names none."""
    sources = sources_of(body)
    return Needs(
        num_pictures=len(sources.pictures),
        has_mask=sources.mask is not None,
        strength=strength_of(body),
        num_layers=body.layers if isinstance(body, EditBody) else None,
    )


def strength_of(body: MediaBody) -> float | None:
    return body.strength if isinstance(body, EditBody | VideoBody) else None


def media_request(
    body: MediaBody,
    card: ModelCard,
    request_id: str,
    pictures: InputPictures = NO_PICTURES,
    *,
    num_frames: int = 1,
    fps: int = 0,
    num_previews: int = 0,
) -> MediaRequest:
    """Returns what the studio is asked for. RequestError says which value does not suit the model."""
    width, height = choose_size(body, card.defaults, next(iter(pictures.pictures), None))
    num_steps = choose_steps(body, card.defaults)
    guidance_scale, true_cfg_scale = choose_scales(body, card)
    request = MediaRequest(
        # Clients may send one id twice; in the gang each job needs its own.
        request_id=f"{request_id}-{secrets.token_hex(4)}",
        model=card.name,
        kind=card.defaults.kind,
        prompt=choose_prompt(body, card),
        negative_prompt=body.negative_prompt,
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=num_steps,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        seed=seed_of(body),
        num_pictures=len(pictures.pictures),
        has_mask=pictures.mask is not None,
        strength=strength_of(body),
        num_layers=choose_layers(body, card.defaults),
        loras=choose_loras(body.model, body.lora or (), card),
        cache=body.cache or "off",
        sound=body.generate_sound if isinstance(body, VideoBody) else None,
        service_tier=TIERS[body.service_tier or "auto"],
        deadline_s=body.deadline_s,
    )
    num_painted = card.defaults.num_steps_of(request)
    return fitting(replace(request, preview_steps=preview_steps(num_painted, num_previews)), card)


def fitting(request: MediaRequest, card: ModelCard) -> MediaRequest:
    """Returns the request. RequestError if it has too few steps for its ``cache``, a negative prompt without guidance,
    or a sound that cannot be."""
    check_negative_prompt(request.negative_prompt, request.true_cfg_scale)
    with blaming("cache"):
        card.defaults.check_cache(request)
    with blaming("generate_sound"):
        card.defaults.check_sound(request)
    return request


def seed_of(body: MediaBody) -> int:
    """Returns the seed that was asked for, or one of chance."""
    return secrets.randbits(RANDOM_SEED_BITS) if body.seed in (None, RANDOM_SEED) else body.seed


def choose_prompt(body: MediaBody, card: ModelCard) -> str:
    """Returns the prompt, which may be empty where the model makes its own."""
    prompt = body.prompt if body.prompt.strip() else ""
    if prompt or card.defaults.describes_pictures:
        return prompt
    if "prompt" not in body.model_fields_set:
        raise RequestError("prompt is required", "prompt", code="missing_field")
    raise RequestError(f"prompt is {shown(body.prompt)}: {BLANK}", "prompt")


def choose_layers(body: MediaBody, defaults: Defaults) -> int:
    """Returns how many layers are asked for; 0 of a model that makes whole pictures, or clips."""
    asked = body.layers if isinstance(body, EditBody) else None
    num_layers = defaults.num_layers if asked is None else asked
    with blaming("layers"):
        defaults.check_layers(num_layers)
    return num_layers


def choose_steps(body: MediaBody, defaults: Defaults) -> int:
    if body.num_inference_steps is None:
        return quality_steps(MEANINGS[body.quality or "auto"], defaults)
    with blaming("num_inference_steps"):
        defaults.check_num_steps(body.num_inference_steps)
    return body.num_inference_steps


def choose_scales(body: MediaBody, card: ModelCard) -> tuple[float, float]:
    """Returns the distilled scale, and that of classifier-free guidance.

    Among clients both are known as ``guidance_scale``: a model has one of them, or none.
    """
    defaults, scale, offset = card.defaults, body.guidance_scale, card.defaults.guidance_offset
    true_cfg_scale = defaults.true_cfg_scale if body.true_cfg_scale is None else body.true_cfg_scale
    if scale is None:
        return defaults.guidance_scale, true_cfg_scale
    if defaults.guidance_scale:
        return scale, true_cfg_scale
    if body.true_cfg_scale is None and defaults.true_cfg_scale > 1:
        return 0.0, max(1.0, scale + offset)  # up to 1 it is off, as in diffusers
    # 0 beside a true scale says that there is no distilled one.
    if scale + offset > 1 and scale + offset != body.true_cfg_scale:
        raise RequestError(_useless_scale(scale, body.true_cfg_scale, card), "guidance_scale")
    return 0.0, true_cfg_scale


def _useless_scale(scale: float, true_cfg_scale: float | None, card: ModelCard) -> str:
    if true_cfg_scale is None:
        none = 1 - card.defaults.guidance_offset
        given = f"guidance_scale is {scale:g}, but {card.name} was made to need none"
        return f"{given}; leave it out, or set it to {none:g}"
    return (
        f"guidance_scale is {scale:g} and true_cfg_scale {true_cfg_scale:g}; {card.name} has one guidance, which both "
        "name: give one of them"
    )


def check_negative_prompt(negative_prompt: str | None, true_cfg_scale: float) -> None:
    if negative_prompt and true_cfg_scale <= 1:
        message = f"negative_prompt has no effect while true_cfg_scale is {true_cfg_scale:g}; set it above 1"
        raise RequestError(message, "negative_prompt")


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Returns ``num_previews`` steps spread over the job, fewer if it is short. The last is the result, no preview."""
    steps = (round(num_steps * (index + 1) / (num_previews + 1)) for index in range(num_previews))
    return tuple(sorted({step for step in steps if 1 <= step < num_steps}))
