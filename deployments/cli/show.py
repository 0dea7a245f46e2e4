"""``troupe models`` and ``troupe show``: served models, and the settings in files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from deployments.cli.client import Client
from deployments.cli.tables import print_table
from deployments.requests.request_errors import escaped
from pipelines.media.metadata import PARAMETERS, Texts, read_texts, settings_in

NOTHING = "no settings: none were written, or a program has removed them"
NONE = "–"
COLUMNS = ("model", "family", "kind", "size", "frames", "steps", "multiple of")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """The metadata of one file."""

    file: Path
    """The picture or clip."""
    settings: dict[str, Any] | None = None
    """Troupe's own fields."""
    texts: Texts
    """Texts of its format by keyword, such as a PNG's."""
    signature: dict[str, Any] | None = None
    """Fields of the C2PA manifest."""
    problem: str | None = None
    """Reason why the file cannot be read."""

    @classmethod
    def of(cls, file: Path) -> FileSettings:
        """Read ``file``. OSError if there is no such file."""
        try:
            texts = read_texts(file)
        except ValueError as error:
            return cls(file=file, texts={}, problem=str(error))
        return cls(file=file, settings=settings_in(texts), texts=texts, signature=_signature(file))

    @property
    def has_settings(self) -> bool:
        return self.settings is not None or PARAMETERS in self.texts

    def document(self) -> dict[str, Any]:
        document = {"file": str(self.file), "settings": self.settings}
        document |= {"texts": dict(self.texts), "signature": self.signature}
        return document if self.problem is None else document | {"problem": self.problem}

    def lines(self) -> Iterator[str]:
        """Yield the file's name and one line per field; another program's text is unchanged."""
        if self.problem is not None:
            yield self.problem
        elif self.settings is not None:
            fields = dict(self.settings)
            yield f"{self.file}: made by {fields.pop('software')}"
            yield from (f"  {name}: {_format(value)}" for name, value in fields.items())
        elif PARAMETERS in self.texts:
            yield f"{self.file}: settings of another program"
            yield from self.texts[PARAMETERS].splitlines()
        elif self.texts:
            yield f"{self.file}: no settings of Troupe; texts of another program: {', '.join(self.texts)}"
        else:
            yield f"{self.file}: {NOTHING}"
        if self.signature is not None:
            state = "and not changed since" if self.signature["is_intact"] else "AND CHANGED SINCE"
            yield f"  signed by {self.signature['signer']} with {self.signature['software']}, {state}"


def show(files: Sequence[Path], *, as_json: bool = False) -> bool:
    """Print the settings in ``files``, as text or one JSON array. Return whether each file has settings."""
    results = [FileSettings.of(file) for file in files]
    if as_json:
        print(json.dumps([result.document() for result in results], indent=2))
    else:
        for result in results:
            for line in "\n".join(result.lines()).split("\n"):
                typer.echo(escaped(line))  # no control sequences for the terminal
    return all(result.has_settings for result in results)


def _signature(file: Path) -> dict[str, Any] | None:
    """Return the fields of the C2PA manifest; None without the extra `provenance`."""
    try:
        from pipelines.media.provenance import signature_of
    except ModuleNotFoundError:
        return None
    return signature_of(file)


def _format(value: object) -> str:
    return value.replace("\n", "\n    ") if isinstance(value, str) else json.dumps(value)


def print_models(url: str, api_key: str, config: str, *, as_json: bool = False) -> None:
    """Print the models as a table or one JSON array."""
    rows = _served_rows(url, api_key) if url else _configured_rows(config)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(COLUMNS, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    cells = row | {"kinds": ", ".join(row["kinds"])}
    return [NONE if cell is None else str(cell) for cell in cells.values()]


def _served_rows(url: str, api_key: str) -> list[dict[str, Any]]:
    with Client(url, api_key) as client:
        return [_row(model["id"], model["family"], model["kinds"], model["defaults"]) for model in client.models()]


def _configured_rows(config: str) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from deployments.cli.serving import load_config
    from deployments.ingress import make_cards

    cards = make_cards(load_config(config).app)
    return [_row(card.name, card.family, card.defaults.kinds, asdict(card.defaults)) for card in cards.values()]


def _row(name: str, family: str, kinds: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a model's cells, in the order of ``COLUMNS``."""
    size, steps = f"{defaults['width']}x{defaults['height']}", defaults["num_inference_steps"]
    frames = defaults["num_frames"] if kinds[0] == "video" else None
    row = {"id": name, "family": family, "kinds": list(kinds), "size": size, "frames": frames, "steps": steps}
    return row | {"size_multiple": defaults["size_multiple"]}
