"""``troupe models``: a table of served models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from deployments.cli.client import Client, kinds_of
from deployments.cli.progress import console

NONE = "–"
COLUMNS = ("model", "family", "kind", "size", "frames", "steps", "size in multiples of")
KEYS = ("id", "family", "kinds", "size", "frames", "steps", "size_multiple")


def print_models(url: str, api_key: str, config: str, *, as_json: bool = False) -> None:
    """Print a row for each model, or the same as one JSON array."""
    rows = _served(url, api_key) if url else _configured(config)
    if as_json:
        print(json.dumps([_document(row) for row in rows], indent=2))
        return
    table = Table(*COLUMNS)
    table.columns[0].overflow = "fold"
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def _served(url: str, api_key: str) -> list[tuple[Any, ...]]:
    with Client(url, api_key) as client:
        return [_row(model["id"], model["family"], kinds_of(model), model["defaults"]) for model in client.models()]


def _configured(config: str) -> list[tuple[Any, ...]]:
    from dataclasses import asdict

    from deployments.cli.serving import load_config
    from deployments.ingress import make_cards

    cards = make_cards(load_config(config).app)
    return [_row(card.name, card.family, card.defaults.kinds, asdict(card.defaults)) for card in cards.values()]


def _document(row: tuple[Any, ...]) -> dict[str, Any]:
    cells = dict(zip(KEYS, row, strict=True))
    return cells | {"kinds": cells["kinds"].split(", "), "frames": None if cells["frames"] == NONE else cells["frames"]}


def _row(name: str, family: str, kinds: Sequence[str], defaults: dict[str, Any]) -> tuple[Any, ...]:
    size = f"{defaults['width']}x{defaults['height']}"
    frames = defaults["num_frames"] if kinds[0] == "video" else NONE
    return name, family, ", ".join(kinds), size, frames, defaults["num_inference_steps"], defaults["size_multiple"]
