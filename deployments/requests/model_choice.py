"""The model of a request and its adapters: by name or alias, or by the input pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.fields import AskedLora
from deployments.requests.request_errors import RequestError, shown
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import Lora, MediaKind, SecondStage

MAX_LORAS = 8
"""Limit for one request: more adapters drown each other."""
BEHIND = ":"
"""Separates the name of a model from the name of its adapter. No model has it in its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Requirements of a request on its model. None: the request has no such value."""

    num_pictures: int = 0
    """Input pictures, without mask and control."""
    has_mask: bool = False
    """A mask comes with pictures or clip."""
    strength: float | None = None
    """Share to paint anew."""
    num_layers: int | None = None
    """Layers of the result."""
    has_video: bool = False
    """It has an input clip."""
    num_videos: int = 0
    """Input clips."""
    keeps_audio: bool = False
    """The sound of clips is kept."""
    has_lora: bool = False
    """It names an adapter, or a recipe, which may have one."""
    has_control: bool = False
    """It has a control picture."""
    has_frame_indices: bool = False
    """It places pictures at frames."""

    @classmethod
    def of(cls, body: MediaBody) -> Needs:
        """Return what ``body`` needs."""
        return cls(
            num_pictures=len(body.sources.pictures),
            has_mask=body.sources.has_mask,
            strength=body.strength if isinstance(body, EditBody | VideoBody) else None,
            num_layers=body.layers if isinstance(body, EditBody) else None,
            has_video=body.sources.video is not None,
            num_videos=len(body.sources.videos),
            keeps_audio=isinstance(body, VideoBody) and bool(body.keep_audio),
            has_lora=bool(body.lora or body.recipe),
            has_control=body.sources.control is not None,
            has_frame_indices=isinstance(body, VideoBody) and body.frame_indices is not None,
        )

    def rank(self, defaults: Defaults) -> tuple[bool, ...]:
        """Return the flaws of a model, the worst first, as a key for ``min``.

        It takes other pictures or no clip, lacks something else, or repaints or splits a picture instead of editing.
        """
        takes_number = defaults.min_pictures <= self.num_pictures <= defaults.max_pictures
        takes_video = defaults.max_video_frames > 0 if self.has_video else not defaults.needs_video
        has_source = self.has_video or self.num_pictures > 0 or not defaults.needs_source
        lacks_lora = self.has_video and defaults.video_needs_lora and not self.has_lora
        masks = defaults.masks_video if self.has_video else defaults.takes_mask
        takes_mask = masks if self.has_mask else not defaults.needs_mask
        takes_strength = defaults.takes_strength or self.strength is None
        takes_layers = defaults.max_layers > 0 or self.num_layers is None
        takes_sound = not self.keeps_audio or defaults.may_keep_audio
        takes_clips = self.num_videos <= max(1, defaults.max_videos)
        takes_places = defaults.takes_frame_indices or not self.has_frame_indices
        suits = defaults.edits or self.num_pictures == 0 or self.strength is not None or self.num_layers is not None
        takes_control = defaults.takes_control if self.has_control else not defaults.needs_control
        return (
            not (takes_number and takes_video and takes_control and has_source) or lacks_lora,
            not (takes_mask and takes_strength and takes_layers and takes_places and takes_sound and takes_clips),
            not suits,
        )


NO_NEEDS = Needs()


def choose_card(
    cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind, needs: Needs = NO_NEEDS
) -> ModelCard:
    """Return the card of the named model, with the defaults of ``kind``. RequestError without such a model.

    Without a name, the model of this kind that suits ``needs`` best is taken, the first of several. If no model takes
    so many pictures, it is the one that takes the most. Models of one kind come before models of both kinds.
    """
    fitting = fitting_cards(cards, kind)
    if name is None:
        if not fitting:
            raise RequestError(f"No {kind} model is served", "model", code="model_not_found")
        fitting.sort(key=lambda card: needs.rank(card.defaults))
        has_too_few = needs.rank(fitting[0].defaults)[0]
        return max(fitting, key=lambda card: card.defaults.max_pictures) if has_too_few else fitting[0]
    card = find_card(cards, name)
    found = next((one for one in fitting if one.name == card.name), None)
    if found is None:
        names = ", ".join(one.name for one in fitting) or "none"
        message = f"{shown(name)} makes {card.defaults.kind}s, not {kind}s; {kind} models served: {names}"
        raise RequestError(message, "model", code="wrong_kind")
    return found


def fitting_cards(cards: Mapping[str, ModelCard], kind: MediaKind) -> list[ModelCard]:
    """Return the cards of models that make ``kind``, with its defaults; models whose own kind it is come first."""
    makers = [card for card in cards.values() if kind in card.defaults.kinds]
    makers.sort(key=lambda card: card.defaults.kind != kind)
    return [replace(card, defaults=card.defaults.of(kind)) for card in makers]


def find_card(cards: Mapping[str, ModelCard], name: object) -> ModelCard:
    """Return the card of a model's name or alias, an adapter's name behind it or not. RequestError lists the models."""
    model = split_name(name)[0]
    for card in cards.values():
        if model == card.name or model in card.aliases:
            return card
    missing = f"There is no model {shown(name)}" if name else "model is empty, and names none"
    message = f"{missing}; models served: {', '.join(cards) or 'none'}"
    raise RequestError(message, "model", code="model_not_found")


def split_name(name: object) -> tuple[object, str | None]:
    """Return the model's name or alias, and the name of the adapter behind it, if any."""
    if not isinstance(name, str) or BEHIND not in name:
        return name, None
    model, _, lora = name.partition(BEHIND)
    return model, lora


def names_others(body: MediaBody, card: ModelCard) -> bool:
    """Return whether ``body`` names an adapter that is not on the model's card, nor a recipe: perhaps one that came."""
    behind = split_name(body.model)[1]
    later = body.second_stage_lora or () if isinstance(body, VideoBody) else ()
    named = {name for name, _ in (*(body.lora or ()), *later)} | (set() if behind is None else {behind})
    return not named <= {*(lora.name for lora in card.loras), *card.recipes}


def choose_loras(model: str | None, asked: Iterable[AskedLora], card: ModelCard) -> tuple[Lora, ...]:
    """Return the adapters ``asked`` for and the one behind the name ``model``, sorted by name, with their scales.

    RequestError for an unknown adapter, or one that is named twice.
    """
    behind = split_name(model)[1]
    wanted = [*(() if behind is None else ((behind, None, "model"),)), *((*one, "lora") for one in asked)]
    names = [name for name, *_ in wanted]
    for name, _, param in wanted:
        check_name(name, card, param)
        if names.count(name) > 1:
            raise RequestError(f"{shown(name)} is named twice; name each adapter once, with its scale", "lora")
    if len(wanted) > MAX_LORAS:
        raise RequestError(f"lora has {len(wanted)} adapters; at most {MAX_LORAS} are allowed", "lora")
    own = {lora.name: lora for lora in card.loras}
    loras = (own[name] if scale is None else replace(own[name], scale=scale) for name, scale, _ in wanted)
    return tuple(sorted(loras, key=lambda lora: lora.name))


def choose_second_stage(body: MediaBody, card: ModelCard) -> SecondStage | None:
    """Return the second pass over the latents; None without one."""
    if not isinstance(body, VideoBody) or not body.second_stage_sigmas:
        if isinstance(body, VideoBody) and body.second_stage_lora:
            message = "second_stage_lora is for a second pass: give second_stage_sigmas as well, or leave it out"
            raise RequestError(message, "second_stage_lora")
        return None
    loras = choose_loras(None, body.second_stage_lora or (), card)
    return SecondStage(scale=card.defaults.stage_scale, sigmas=body.second_stage_sigmas, loras=loras)


def names_lora(body: MediaBody) -> bool:
    """Return whether ``body`` names an adapter, known or not. Its recipe must be applied before."""
    return bool(body.lora) or split_name(body.model)[1] is not None


def check_loras(loras: Iterable[Lora], card: ModelCard) -> None:
    """Raise RequestError unless the model is served with ``loras``: its own, or any that came at run time."""
    for lora in loras:
        if not lora.folder:
            check_name(lora.name, card, "lora")
        elif card.runtime_loras is None:
            message = f"{card.name} is served without adapters of clients, such as {shown(lora.name)}"
            raise RequestError(message, "lora", code="lora_not_found")


def check_name(name: str, card: ModelCard, param: str, code: str = "lora_not_found") -> None:
    """Raise RequestError, which lists the model's adapters, for any other adapter."""
    if name not in (lora.name for lora in card.loras):
        known = ", ".join(lora.name for lora in card.loras) or "none"
        recipes = f"; its recipes: {', '.join(card.recipes)}" if card.recipes else ""
        message = f"{card.name} is served without an adapter {shown(name)}; its adapters: {known}{recipes}"
        raise RequestError(message, param, code=code)
