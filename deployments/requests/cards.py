"""Which model is meant: by its name or alias, or by what is to be made of how many pictures."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.requests.errors import RequestError, shown
from deployments.requests.loras import split_name
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.request import MediaKind


def choose_card(cards: Mapping[str, ModelCard], name: str | None, kind: MediaKind, num_pictures: int = 0) -> ModelCard:
    """Returns the card of the model asked for. RequestError if there is none of that name and kind.

    Without a name it is the first of its kind that takes ``num_pictures``; without such a one, that takes the most.
    """
    fitting = [card for card in cards.values() if card.defaults.kind == kind]
    if name is None:
        if not fitting:
            raise RequestError(f"No {kind} model is served", "model", code="model_not_found")
        most = max(fitting, key=lambda card: card.defaults.max_pictures)
        return next((card for card in fitting if takes(card.defaults, num_pictures)), most)
    card = find_card(cards, name)
    if card not in fitting:
        names = ", ".join(one.name for one in fitting) or "none"
        message = f"{shown(name)} makes {card.defaults.kind}s, not {kind}s; {kind} models served: {names}"
        raise RequestError(message, "model", code="wrong_kind")
    return card


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
