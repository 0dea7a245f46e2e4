"""Rules that depend on the model: from a checked body and a model's card to the frozen requests for the studio."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments.api.errors import ApiError, invalid, shown
from deployments.requests.bodies import MAX_SEED, MediaBody
from deployments.studio.interface import ModelCard, Studio
from pipelines.defaults import Defaults
from pipelines.request import MediaKind, MediaRequest
from pipelines.size import Size

RANDOM_SEED_BITS = 32


async def ready_card(studio: Studio, name: str | None, kind: MediaKind) -> ModelCard:
    """The card of the model asked for. ApiError 404 or 400 if there is none, 503 while it is not ready."""
    card = choose_card(studio.cards(), name, kind)
    reason = (await studio.not_ready()).get(card.name)
    if reason is not None:
        message = f"{card.name} is not ready: {reason}"
        raise ApiError(503, message, code="model_not_ready", headers={"Retry-After": "2"})
    return card


def choose_card(cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind) -> ModelCard:
    fitting = [card for card in cards.values() if card.defaults.kind == kind]
    names = ", ".join(card.name for card in fitting) or "none"
    if name is None:
        if not fitting:
            raise ApiError(404, f"No {kind} model is served", param="model", code="model_not_found")
        return fitting[0]
    if name not in cards:
        raise no_model(name, cards)
    if cards[name] not in fitting:
        message = f"{shown(name)} makes {cards[name].defaults.kind}s, not {kind}s; {kind} models served: {names}"
        raise invalid("model", message, code="wrong_kind")
    return cards[name]


def no_model(name: str, cards: Mapping[str, ModelCard]) -> ApiError:
    message = f"There is no model {shown(name)}; models served: {', '.join(cards) or 'none'}"
    return ApiError(404, message, param="model", code="model_not_found")


def media_request(
    body: MediaBody,
    card: ModelCard,
    request_id: str,
    *,
    num_frames: int = 1,
    fps: int = 0,
    num_previews: int = 0,
) -> MediaRequest:
    """What the studio is asked for, or the ApiError that says which value does not suit the model."""
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


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """The model's own refusals, with the field of the body that they are about."""
    try:
        yield
    except ValueError as error:
        raise invalid(field, str(error)) from None


def check_size(size: str | None, defaults: Defaults) -> tuple[int, int]:
    """Width and height in pixels."""
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
        raise invalid("negative_prompt", message)


def check_guidance(guidance_scale: float | None, card: ModelCard) -> None:
    if guidance_scale and not card.defaults.guidance_scale:
        message = f"guidance_scale is {guidance_scale:g}, but {card.name} has no distilled guidance; use true_cfg_scale"
        raise invalid("guidance_scale", message)


def check_seeds(seed: int, n: int) -> None:
    if seed + n - 1 > MAX_SEED:
        raise invalid("seed", f"seed is {seed} and n is {n}: seed + n - 1 must be at most {MAX_SEED}")


def clip_length(
    seconds: str | int | None, num_frames: int | None, fps: int | None, defaults: Defaults
) -> tuple[int, int]:
    """Frames and frames per second. A clip has 1 + k × ``frame_multiple`` frames; ``seconds`` takes the nearest."""
    if seconds is not None and num_frames is not None:
        raise invalid("seconds", "seconds and num_frames are two ways to say one thing; give one of them")
    rate = fps or defaults.fps
    if seconds is None:
        return check_num_frames(num_frames or defaults.num_frames, defaults), rate
    wanted = float(seconds) * rate
    frames = 1 + max(0, round((wanted - 1) / defaults.frame_multiple)) * defaults.frame_multiple
    if wanted <= 0 or frames > defaults.max_frames:
        longest = f"{defaults.max_frames / rate:.3f}".rstrip("0").rstrip(".")
        raise invalid("seconds", f"seconds is {seconds}; at {rate} fps it must be above 0 and at most {longest}")
    return frames, rate


def check_num_frames(num_frames: int, defaults: Defaults) -> int:
    with blaming("num_frames"):
        defaults.check_num_frames(num_frames)
    return num_frames


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """``num_previews`` steps spread over the job, without its last (that one is the result); fewer if it is short."""
    wanted = (round(num_steps * (index + 1) / (num_previews + 1)) for index in range(num_previews))
    return tuple(sorted({step for step in wanted if 1 <= step < num_steps}))
