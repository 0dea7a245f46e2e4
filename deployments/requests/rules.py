"""Rules that depend on the model: they turn a checked body and a model's card into a frozen request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.fields import BLANK, RANDOM_SEED, Quality, WrittenQuality
from deployments.requests.model_choice import check_loras, choose_loras, choose_second_stage, names_lora
from deployments.requests.pictures.limits import check_shapes
from deployments.requests.pictures.sources import Sources
from deployments.requests.pictures.video import VideoForm, VideoHead
from deployments.requests.request_errors import RequestError, blaming, shown
from deployments.requests.size_choice import asks_for_length, choose_length, choose_size, has_size
from deployments.service.interface import ModelCard
from engines.core.spec import Attention
from pipelines.defaults import Defaults
from pipelines.request import COPIED_RATE, NO_PICTURES, InputPictures, MediaRequest, ServiceTier
from pipelines.solver import Solver

RANDOM_SEED_BITS = 32
NUM_PREVIEWS = 3
"""Previews of a clip that are decoded while it is made."""
TIERS: Mapping[str, ServiceTier] = {"auto": "default", "default": "default", "flex": "flex", "priority": "priority"}
"""Service tiers by the names that OpenAI gives them."""
QUALITIES: Mapping[WrittenQuality, Quality] = {
    "auto": "medium",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "standard": "medium",
    "hd": "high",
}
"""Qualities by the names that OpenAI gives them."""
QUALITY_SHARES: Mapping[Quality, float] = {"low": 0.5, "medium": 1.0, "high": 1.5}
"""Steps, as a share of the model's default number."""
BODY_FIELDS = {
    "has_mask": "mask",
    "has_control": "control_image",
    "num_video_frames": "video",
    "sound_samples": "keep_audio",
    "num_layers": "layers",
    "sound": "generate_sound",
    "second_stage": "second_stage_sigmas",
    "loras": "lora",
}
"""Fields of ``MediaRequest`` that have another name in a body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requester:
    """Sender and arrival of a request."""

    request_id: str
    """Id of the HTTP request: the client's, or a new one."""
    key: str = ""
    """Hash of the API key; empty without keys."""
    weight: float = 1.0
    """The key's share of a gang, relative to others."""
    came_s: float = field(default_factory=time.monotonic)
    """Arrival by the monotonic clock."""

    @property
    def waited_s(self) -> float:
        """Seconds since the arrival."""
        return time.monotonic() - self.came_s


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The rules of one model for requests."""

    card: ModelCard
    """The model."""

    def check_sources(self, body: MediaBody) -> Sources:
        """Return the encoded pictures of ``body``. RequestError if the model takes another number, or no mask."""
        sources, defaults = body.sources, self.card.defaults
        if not body.picture_fields and (defaults.min_pictures or defaults.needs_control):
            what = "changes" if defaults.min_pictures else "follows"
            message = f"{self.card.name} {what} pictures: send them along, to POST /v1/images/edits"
            raise RequestError(message, "model")
        with blaming(sources.param):
            defaults.check_num_pictures(len(sources.pictures), has_video=sources.video is not None)
        with blaming("mask"):
            defaults.check_mask(len(sources.pictures), sources.has_mask, has_video=sources.video is not None)
            sources.check_video_mask()
        with blaming("control_image"):
            defaults.check_control(sources.control is not None)
        with blaming("video"):
            defaults.check_video(0 if sources.video is None else defaults.min_video_frames, len(sources.pictures))
            defaults.check_num_videos(len(sources.videos))
        with blaming("keep_audio"):
            check_keep_audio(body, sources, defaults)
        if sources.video is not None:
            check_context(self.card, has_lora=names_lora(body))
        return sources

    def video_form(self, body: MediaBody, head: VideoHead, pictures: InputPictures = NO_PICTURES) -> VideoForm:
        """Return the form of the clip of ``body``: in the size of the result, at its rate or the model's own.

        Without a given size, the clip decides the result's shape, or the first of the input ``pictures``.
        RequestError if they do not suit the model. It is checked before the clip is decoded.
        """
        defaults = self.card.defaults
        length, fps = choose_length(body, defaults)
        is_by_picture = defaults.shaped_by_picture and len(pictures.pictures) > 0
        width, height = choose_size(body, defaults, pictures.pictures[0] if is_by_picture else head)
        with blaming("size" if has_size(body) else "width"):
            defaults.check_size(width, height)
        is_cut = defaults.cuts_video or (defaults.keeps_length and asks_for_length(body))
        if is_cut:
            with blaming("num_frames"):
                defaults.check_num_frames(length)
        return VideoForm(
            width=width,
            height=height,
            fps=defaults.video_fps or fps,
            max_frames=length if is_cut else defaults.max_video_frames,
            is_cut=is_cut,
            frame_multiple=defaults.frame_multiple if defaults.keeps_length else 1,
            min_frames=defaults.min_video_frames,
            is_whole=defaults.shaped_by_picture,
            sound_rate=(defaults.video_sound_rate or COPIED_RATE) if keeps_audio(body) else 0,
        )

    def check(
        self, body: MediaBody, pictures: InputPictures, requester: Requester, num_previews: int = 0
    ) -> MediaRequest:
        """Return the request of ``body`` with its decoded ``pictures``.

        RequestError names the first field that does not suit the model or another field.
        """
        request = self._request(body, pictures, requester)
        for name, check in checks(request, self.card):
            with blaming(_body_field(name, body)):
                check()
        check_shapes(pictures, self.card.defaults.max_reference_aspect, body.sources.param)
        check_negative_prompt(request)
        check_background(body, request)
        num_steps = self.card.defaults.num_steps_of(request)
        return replace(request, preview_steps=preview_steps(num_steps, num_previews))

    def _request(self, body: MediaBody, pictures: InputPictures, requester: Requester) -> MediaRequest:
        """Return the request with the model's defaults. Its values are not compared with the limits."""
        defaults = self.card.defaults
        video = pictures.video
        num_frames, fps = choose_length(body, defaults, video)
        width, height = choose_size(body, defaults, next(iter(pictures.pictures), pictures.control))
        if video is not None:  # which has the size that was chosen by the input clip
            width, height = video.width, video.height
        guidance_scale, true_cfg_scale = choose_scales(body, self.card)
        return MediaRequest(
            **_requester_fields(requester),
            model=self.card.name,
            kind=defaults.kind,
            prompt=choose_prompt(body, defaults),
            enhance_prompt=choose_enhancement(body, self.card),
            negative_prompt=body.negative_prompt,
            width=width,
            height=height,
            num_frames=num_frames,
            fps=fps,
            num_inference_steps=choose_steps(body, defaults),
            solver=choose_solver(body),
            second_stage=choose_second_stage(body, self.card),
            guidance_scale=guidance_scale,
            true_cfg_scale=defaults.guidance_beside(body.negative_prompt, true_cfg_scale),
            seed=choose_seed(body),
            **choose_inputs(body, pictures, defaults),
            strength=body.strength if isinstance(body, EditBody | VideoBody) else None,
            num_layers=choose_layers(body, defaults),
            loras=choose_loras(body.model, body.lora or (), self.card),
            cache=body.cache or "off",
            attention=choose_attention(body, self.card),
            sound=body.generate_sound if isinstance(body, VideoBody) else None,
            service_tier=TIERS[body.service_tier or "auto"],
            deadline_s=body.deadline_s,
        )


def _requester_fields(requester: Requester) -> dict[str, Any]:
    """Return the client's fields and its waiting time. Clients may repeat an id; in the gang each job has its own."""
    request_id = f"{requester.request_id}-{secrets.token_hex(4)}"
    return {"request_id": request_id, "key": requester.key, "weight": requester.weight, "waited_s": requester.waited_s}


def checks(request: MediaRequest, card: ModelCard) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every check of a request that depends on its model, each with the field of ``MediaRequest``."""
    yield "loras", partial(check_loras, request.all_loras, card)
    yield "attention", partial(check_attention, request.attention, card)
    if 0 < request.num_video_frames < card.defaults.min_video_frames:  # before the length, which it may decide
        yield "num_video_frames", partial(card.defaults.check_video, request.num_video_frames)
    yield from card.defaults.checks(request)
    if request.num_video_frames:
        yield "num_video_frames", partial(check_context, card, has_lora=bool(request.loras))


def check_kept(request: MediaRequest, card: ModelCard) -> None:
    """Raise ValueError if a request that was accepted before suits its model no longer, as it is served now."""
    for _, check in checks(request, card):
        try:
            check()
        except ValueError as error:
            message = f"{card.name} is served in another way than when this was accepted, and would refuse it: {error}"
            raise ValueError(message) from None


B = TypeVar("B", bound=MediaBody, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRequest(Generic[B]):
    """A request whose model is chosen and whose pictures and clip are decoded."""

    card: ModelCard
    """The chosen model."""
    body: B
    """The checked body."""
    pictures: InputPictures = NO_PICTURES
    """Input pictures and clip."""


def _body_field(name: str, body: MediaBody) -> str:
    """Return the field of ``body`` to blame for the field ``name`` of ``MediaRequest``."""
    if name == "num_pictures":
        return body.sources.param
    if name == "width" and has_size(body):
        return "size"
    return BODY_FIELDS.get(name, name)


def choose_seed(body: MediaBody) -> int:
    """Return the seed of ``body``, or a random one."""
    return secrets.randbits(RANDOM_SEED_BITS) if body.seed in (None, RANDOM_SEED) else body.seed


def choose_prompt(body: MediaBody, defaults: Defaults) -> str:
    """Return the prompt, which may be empty where the model makes its own."""
    prompt = body.prompt if body.prompt.strip() else ""
    if prompt or defaults.describes_pictures:
        return prompt
    if "prompt" not in body.model_fields_set:
        raise RequestError("prompt is required", "prompt", code="missing_field")
    raise RequestError(f"prompt is {shown(body.prompt)}: {BLANK}", "prompt")


def choose_enhancement(body: MediaBody, card: ModelCard) -> bool | None:
    """Return whether the prompt is to be rewritten; None of a model without an enhancer."""
    default, is_wanted = card.enhances_prompts, body.enhance_prompt
    if default is None and is_wanted:
        message = f"enhance_prompt is true, but {card.name} is served without a prompt enhancer"
        raise RequestError(f"{message}; leave it out, or send false", "enhance_prompt")
    if is_wanted and not body.prompt.strip():
        message = "enhance_prompt is true, but the prompt is empty; write one, or send false"
        raise RequestError(message, "enhance_prompt")
    return default if default is None or is_wanted is None else is_wanted


def choose_attention(body: MediaBody, card: ModelCard) -> Attention | None:
    """Return the precision of attention; None for the gang's own."""
    check_attention(body.attention, card)
    return None if body.attention == card.attentions[0] else body.attention


def check_attention(attention: Attention | None, card: ModelCard) -> None:
    if attention not in (None, *card.attentions):
        message = f"attention is {shown(attention)}; {card.name} is served with {' and '.join(card.attentions)}"
        raise RequestError(f"{message}; name one of them, or leave it out", "attention")


def keeps_audio(body: MediaBody) -> bool:
    """Return whether ``body`` keeps the sound of its clips."""
    return isinstance(body, VideoBody) and bool(body.keep_audio)


def check_keep_audio(body: MediaBody, sources: Sources, defaults: Defaults) -> None:
    """Raise ValueError if ``body`` keeps a sound without a clip, or the model has no use for one."""
    if isinstance(body, VideoBody) and body.keep_audio:
        defaults.check_keep_audio(body.generate_sound)
        if sources.video is None:
            raise ValueError("keep_audio is true, without an input clip: send one as video, or leave it out")


def choose_inputs(body: MediaBody, pictures: InputPictures, defaults: Defaults) -> dict[str, Any]:
    """Return the inputs of ``body`` and their options, as fields of ``MediaRequest``."""
    sounds = tuple(one.sound for one in pictures.videos) if keeps_audio(body) else ()
    inputs = {
        "num_pictures": len(pictures.pictures),
        "has_mask": pictures.mask is not None or pictures.video_mask is not None,
        "num_video_frames": 0 if pictures.video is None else pictures.video.num_frames,
        "further_video_frames": tuple(one.num_frames for one in pictures.further_videos),
        "sound_samples": tuple(0 if sound is None else sound.num_samples for sound in sounds),
        "copies_sound": bool(sounds) and not defaults.video_sound_rate,
    }
    if isinstance(body, VideoBody):
        return {**inputs, "frame_indices": body.frame_indices or (), "control_scale": body.control_scale}
    if not isinstance(body, EditBody):
        return inputs
    return {
        **inputs,
        "has_control": pictures.control is not None,
        "control_scale": body.control_scale,
        "control_guidance_start": body.control_guidance_start,
        "control_guidance_end": body.control_guidance_end,
    }


def choose_layers(body: MediaBody, defaults: Defaults) -> int:
    """Return the number of layers; 0 for a model that makes whole pictures, or clips."""
    given = body.layers if isinstance(body, EditBody) else None
    return defaults.num_layers if given is None else given


def choose_solver(body: MediaBody) -> Solver:
    return Solver(
        scheduler=body.scheduler or "",
        flow_shift=body.flow_shift,
        sigmas=body.sigmas or (),
        timesteps=body.timesteps or (),
        guidance_scale_2=body.guidance_scale_2,
        boundary_ratio=body.boundary_ratio,
    )


def choose_steps(body: MediaBody, defaults: Defaults) -> int:
    """Return the number of steps: that of given sigmas or timesteps, the given number, or that of the quality."""
    if given := body.sigmas or body.timesteps:
        if body.num_inference_steps not in (None, len(given)):
            name = "sigmas" if body.sigmas else "timesteps"
            message = f"num_inference_steps is {body.num_inference_steps}, and {name} has {len(given)}; leave it out"
            raise RequestError(message, "num_inference_steps")
        return len(given)
    if body.num_inference_steps is None:
        return quality_steps(QUALITIES[body.quality or "auto"], defaults)
    return body.num_inference_steps


def quality_steps(quality: Quality, defaults: Defaults) -> int:
    """Return the steps that ``quality`` stands for, within the model's limits."""
    num_steps = round(QUALITY_SHARES[quality] * defaults.num_inference_steps)
    return max(defaults.min_steps, min(defaults.max_steps, num_steps))


def choose_scales(body: MediaBody, card: ModelCard) -> tuple[float, float]:
    """Return the distilled scale, and the scale of classifier-free guidance.

    Clients call both ``guidance_scale``: a model has one of them, or none.
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


def check_background(body: MediaBody, request: MediaRequest) -> None:
    """Raise RequestError if a transparent result is asked of a model that makes none, or an opaque one of layers.

    Also for a colour without input pictures, beneath which it would be.
    """
    if body.background == "transparent" and not request.num_layers:
        raise RequestError("background is transparent, but what this model makes is opaque; leave it out", "background")
    if body.background == "opaque" and request.num_layers:
        raise RequestError("background is opaque, but layers are transparent; leave it out", "background")
    if body.ground is not None and not (request.num_pictures or request.has_control):
        message = f"background is {body.ground}, the colour beneath transparent input pictures, and there are none"
        raise RequestError(f"{message}; send some, or leave it out", "background")


def check_context(card: ModelCard, *, has_lora: bool) -> None:
    """Raise RequestError for a clip that is an adapter's context, if the request names no adapter."""
    if card.defaults.video_needs_lora and not has_lora:
        message = f"{card.name} takes a clip as the context of an adapter (IC-LoRA), and the request names none"
        raise RequestError(f"{message}: name one in lora, or leave video out", "video")


def check_negative_prompt(request: MediaRequest) -> None:
    if request.negative_prompt and request.true_cfg_scale <= 1:
        scale = f"{request.true_cfg_scale:g}"
        message = f"negative_prompt has no effect while true_cfg_scale is {scale}; set it above 1"
        raise RequestError(message, "negative_prompt")


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Return ``num_previews`` steps spread over the job, fewer if it is short. The last is the result, no preview."""
    steps = (round(num_steps * (index + 1) / (num_previews + 1)) for index in range(num_previews))
    return tuple(sorted({step for step in steps if 1 <= step < num_steps}))
