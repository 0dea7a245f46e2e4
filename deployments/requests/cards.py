"""Which model is meant: by its name or alias, or by what is to be made of how many pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deployments.requests.errors import RequestError, shown
from deployments.requests.loras import split_name
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import MediaKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a request needs of a model; None: it says nothing of it."""

    num_pictures: int = 0
    has_mask: bool = False
    strength: float | None = None
    num_layers: int | None = None

    def rank(self, defaults: Defaults) -> tuple[bool, ...]:
        """Return how badly a model suits, for ``min``: whether it takes other numbers of pictures, whether it lacks
        something else, and whether it would paint over, or take apart, a picture that is to be changed."""
        takes_number = defaults.min_pictures <= self.num_pictures <= defaults.max_pictures
        takes_mask = defaults.takes_mask if self.has_mask else not defaults.needs_mask
        takes_strength = defaults.takes_strength or self.strength is None
        takes_layers = defaults.max_layers > 0 or self.num_layers is None
        suits = defaults.edits or self.num_pictures == 0 or self.strength is not None or self.num_layers is not None
        return not takes_number, not (takes_mask and takes_strength and takes_layers), not suits


NO_NEEDS = Needs()


def choose_card(
    cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind, needs: Needs = NO_NEEDS
) -> ModelCard:
    """Returns the card of the model asked for, with the defaults of ``kind``. RequestError if there is none of that
    name and kind.

    Without a name it is the first of its kind that suits ``needs`` best: of models that take the pictures one that
    edits before one that paints over them. Where none takes as many, it is the one that takes the most.
    Models that make nothing else come before those of clips and pictures.
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
    """Returns the cards of models that make ``kind``, with the defaults of that; those of which it is the own first."""
    makers = [card for card in cards.values() if kind in card.defaults.kinds]
    makers.sort(key=lambda card: card.defaults.kind != kind)
    return [replace(card, defaults=card.defaults.of(kind)) for card in makers]


def find_card(cards: Mapping[str, ModelCard], name: object) -> ModelCard:
    """Returns the card of that name or alias, with an adapter's behind it or not. RequestError lists what there is."""
    model = split_name(name)[0]
    for card in cards.values():
        if model == card.name or model in card.aliases:
            return card
    missing = f"There is no model {shown(name)}" if name else "model is empty, and names none"
    message = f"{missing}; models served: {', '.join(cards) or 'none'}"
    raise RequestError(message, "model", code="model_not_found")
