"""Rules that depend on the model: from a checked body and a model's card to the frozen requests for the studio."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from deployments.requests.bodies import MediaBody
from deployments.requests.errors import RequestError, blaming, shown
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import MediaKind, MediaRequest
from pipelines.size import Size

RANDOM_SEED_BITS = 32


def choose_card(cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind) -> ModelCard:
    """Returns the card of the model asked for. RequestError if there is none of that name and kind."""
    fitting = [card for card in cards.values() if card.defaults.kind == kind]
    names = ", ".join(card.name for card in fitting) or "none"
    if name is None:
        if not fitting:
            raise RequestError(f"No {kind} model is served", "model", code="model_not_found")
        return fitting[0]
    if name not in cards:
        raise no_model(name, cards)
    if cards[name] not in fitting:
        message = f"{shown(name)} makes {cards[name].defaults.kind}s, not {kind}s; {kind} models served: {names}"
        raise RequestError(message, "model", code="wrong_kind")
    return cards[name]


def no_model(name: object, cards: Mapping[str, ModelCard]) -> RequestError:
    message = f"There is no model {shown(name)}; models served: {', '.join(cards) or 'none'}"
    return RequestError(message, "model", code="model_not_found")


def media_request(
    body: MediaBody,
    card: ModelCard,
    request_id: str,
    *,
    num_frames: int = 1,
    fps: int = 0,
    num_previews: int = 0,
) -> MediaRequest:
    """Returns what the studio is asked for. RequestError says which value does not suit the model."""
    width, height = check_size(body.size, card.defaults)
    num_steps = check_steps(body.num_inference_steps, card.defaults)
    scale = card.defaults.true_cfg_scale if body.true_cfg_scale is None else body.true_cfg_scale
    check_negative_prompt(body.negative_prompt, scale)
    check_guidance(body.guidance_scale, card)
    return MediaRequest(
        # Clients may send one id twice; in the gang each job needs its own.
        request_id=f"{request_id}-{secrets.token_hex(4)}",
        model=card.name,
        kind=card.defaults.kind,
        prompt=body.prompt,
        negative_prompt=body.negative_prompt or "",
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=num_steps,
        guidance_scale=card.defaults.guidance_scale if body.guidance_scale is None else body.guidance_scale,
        true_cfg_scale=scale,
        seed=secrets.randbits(RANDOM_SEED_BITS) if body.seed is None else body.seed,
        preview_steps=preview_steps(num_steps, num_previews),
    )


def check_size(size: str | None, defaults: Defaults) -> tuple[int, int]:
    """Returns width and height in pixels."""
    if size is None or size == "auto":
        return defaults.width, defaults.height
    wanted = Size.parse(size)
    with blaming("size"):
        defaults.check_size(wanted.width, wanted.height)
    return wanted.width, wanted.height


def check_steps(num_steps: int | None, defaults: Defaults) -> int:
    if num_steps is None:
        return defaults.num_inference_steps
    with blaming("num_inference_steps"):
        defaults.check_num_steps(num_steps)
    return num_steps


def check_negative_prompt(negative_prompt: str | None, true_cfg_scale: float) -> None:
    if negative_prompt and true_cfg_scale <= 1:
        message = f"negative_prompt has no effect while true_cfg_scale is {true_cfg_scale:g}; set it above 1"
        raise RequestError(message, "negative_prompt")


def check_guidance(guidance_scale: float | None, card: ModelCard) -> None:
    if guidance_scale and not card.defaults.guidance_scale:
        message = f"guidance_scale is {guidance_scale:g}, but {card.name} has no distilled guidance; use true_cfg_scale"
        raise RequestError(message, "guidance_scale")


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Returns ``num_previews`` steps spread over the job, fewer if it is short. The last is the result, no preview."""
    steps = (round(num_steps * (index + 1) / (num_previews + 1)) for index in range(num_previews))
    return tuple(sorted({step for step in steps if 1 <= step < num_steps}))
