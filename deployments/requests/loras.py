"""The adapters that a request asks for: by name in a field, or behind the name of its model."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.requests.errors import RequestError, shown
from deployments.requests.fields import AskedLora
from deployments.studio.interface import ModelCard
from pipelines.request import Lora

MAX_LORAS = 8
"""Of a request: beyond a few, adapters drown each other."""
BEHIND = ":"
"""Between the name of a model and that of its adapter. No model has it in its name."""


def split_name(name: object) -> tuple[object, str | None]:
    """Returns the model's name or alias, and that of the adapter behind it, if there is one."""
    if not isinstance(name, str) or BEHIND not in name:
        return name, None
    model, _, lora = name.partition(BEHIND)
    return model, lora


def choose_loras(model: str | None, asked: Iterable[AskedLora], card: ModelCard) -> tuple[Lora, ...]:
    """Returns the adapters of ``asked`` and that behind the name ``model``, by name, with their scales.

    RequestError for one that the model is not served with, or that is named twice.
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
    own = {lora.name: lora.scale for lora in card.loras}
    loras = (Lora(name=name, scale=own[name] if scale is None else scale) for name, scale, _ in wanted)
    return tuple(sorted(loras, key=lambda lora: lora.name))


def check_name(name: str, card: ModelCard, param: str, code: str = "lora_not_found") -> None:
    """Raises RequestError, with the names that there are, for an adapter that the model is not served with."""
    if name not in (lora.name for lora in card.loras):
        known = ", ".join(lora.name for lora in card.loras) or "none"
        message = f"{card.name} is served without an adapter {shown(name)}; its adapters: {known}"
        raise RequestError(message, param, code=code)
