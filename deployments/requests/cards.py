"""Which model is meant: by its name or alias, or by what is to be made of how many pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deployments.requests.errors import RequestError, shown
from deployments.requests.loras import split_name
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import MediaKind


def choose_card(cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind, num_pictures: int = 0) -> ModelCard:
    """Returns the card of the model asked for, with the defaults of ``kind``. RequestError if there is none of that
    name and kind.

    Without a name it is the first of its kind that takes ``num_pictures``; without such a one, that takes the most.
    Models that make nothing else come before those of clips and pictures.
    """
    fitting = fitting_cards(cards, kind)
    if name is None:
        if not fitting:
            raise RequestError(f"No {kind} model is served", "model", code="model_not_found")
        most = max(fitting, key=lambda card: card.defaults.max_pictures)
        return next((card for card in fitting if takes(card.defaults, num_pictures)), most)
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


def takes(defaults: Defaults, num_pictures: int) -> bool:
    return defaults.min_pictures <= num_pictures <= defaults.max_pictures


def find_card(cards: Mapping[str, ModelCard], name: object) -> ModelCard:
    """Returns the card of that name or alias, with an adapter's behind it or not. RequestError lists what there is."""
    model = split_name(name)[0]
    for card in cards.values():
        if model == card.name or model in card.aliases:
            return card
    message = f"There is no model {shown(name)}; models served: {', '.join(cards) or 'none'}"
    raise RequestError(message, "model", code="model_not_found")
