"""Adapters that clients add at run time: rows of the database, and one folder for each in the data directory.

``http/routes/loras.py`` checks names and bytes, ``pipelines/lora/lora_cache.py`` what is in the files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal
from uuid import uuid4

from sqlalchemy import delete, func, or_, select, update

from deployments.clips.storage import data_folder
from deployments.database.database import Database, insert_into, row_of
from deployments.database.tables import LoraRow
from deployments.places import PRIVATE_FILE, make_folder, make_private
from deployments.service.interface import ModelCard
from pipelines.lora.source import LORA_FILE, PEFT_CONFIG
from pipelines.request import Lora

KEEP_S = 3600.0
"""Time for which files without a row stay. Requests that were accepted before may still need them."""
LoraStatus = Literal["loading", "ready"]


def lora_folder(data_dir: Path) -> Path:
    """Return the folder of all adapters. Ranks see it under the same path."""
    return data_dir.absolute() / "loras"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraRecord:
    """An adapter of a model."""

    id: str
    """``lora_`` and 128 random bits."""
    model: str
    """The model's name in the application."""
    name: str
    """Name by which requests ask for it, unique within model and scope."""
    scope: str
    """Hash of the only key that may use it; empty: all may."""
    key_hash: str
    """The key that added it."""
    scale: float = 1.0
    """Its scale in requests that give none."""
    part: str = ""
    """Prefix of its keys in the file, as in ``LoraSource``."""
    num_bytes: int = 0
    """Size of its files."""
    status: LoraStatus = "loading"
    """"ready" once all gangs have it."""
    created_at_s: float = 0.0
    """Unix time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraStore:
    """Adapters that clients add. ``viewer`` is the hash of the key that looks, None for all adapters.

    Methods that touch files block.
    """

    database: Database
    """Holds the records."""
    root: Path
    """Folder of the adapters' files."""

    async def add(self, record: LoraRecord, max_loras: int) -> str | None:
        """Reserve the record's name. Return why it cannot be added: "exists", or "full" at the model's limit."""
        engine = self.database.engine
        count = select(func.count()).select_from(LoraRow).where(LoraRow.model == record.model)
        async with engine.connect() as connection:
            if (await connection.scalar(count) or 0) >= max_loras:
                return "full"
        insert = insert_into(LoraRow, engine).values(**asdict(record))
        insert = insert.on_conflict_do_nothing(index_elements=["model", "scope", "name"])
        row = await row_of(engine, insert.returning(LoraRow.number))
        if row is None:
            return "exists"
        async with engine.connect() as connection:  # others may have come since the first look
            is_full = (await connection.scalar(count.where(LoraRow.number <= row.number)) or 0) > max_loras
        if is_full:
            await self.remove(record.id)
            return "full"
        return None

    async def set_ready(self, lora_id: str) -> bool:
        """Let requests name an adapter. Return whether it is still there."""
        ready = update(LoraRow).where(LoraRow.id == lora_id).values(status="ready")
        return await row_of(self.database.engine, ready.returning(LoraRow.id)) is not None

    async def remove(self, lora_id: str) -> None:
        """Forget an adapter. Its files stay for ``KEEP_S``."""
        async with self.database.engine.begin() as connection:
            await connection.execute(delete(LoraRow).where(LoraRow.id == lora_id))

    async def visible(self, viewer: str | None, *, lora_id: str = "", status: str = "") -> list[LoraRecord]:
        """Return the adapters that ``viewer`` may use: first those for all keys, then in the order of their arrival."""
        query = select(*LoraRow.__table__.c).order_by(LoraRow.scope != "", LoraRow.number)
        if viewer is not None:
            query = query.where(or_(LoraRow.scope == "", LoraRow.scope == viewer))
        query = query.where(LoraRow.id == lora_id) if lora_id else query
        query = query.where(LoraRow.status == status) if status else query
        async with self.database.engine.connect() as connection:
            return [_record(row) for row in await connection.execute(query)]

    async def on_cards(self, cards: Mapping[str, ModelCard], viewer: str | None) -> Mapping[str, ModelCard]:
        """Return ``cards`` with the adapters that ``viewer`` may use. A key's own precedes one of the same name."""
        if not any(card.runtime_loras for card in cards.values()):
            return cards
        added: dict[str, dict[str, Lora]] = {}
        for record in await self.visible(viewer, status="ready"):
            added.setdefault(record.model, {})[record.name] = self.lora(record)
        return {name: _with_loras(card, added.get(name, {})) for name, card in cards.items()}

    def lora(self, record: LoraRecord) -> Lora:
        """Return the adapter as a request names it."""
        return Lora(name=record.name, scale=record.scale, folder=str(self.root / record.id), part=record.part)

    def write(self, lora_id: str, file: BinaryIO, config: BinaryIO | None = None) -> int:
        """Write the files of an adapter, and return the size of the first."""
        folder = self.root / lora_id
        with data_folder(self.root):
            make_private(self.root)
            make_folder(folder)
            num_bytes = _write(folder / LORA_FILE, file)
            if config is not None:
                _write(folder / PEFT_CONFIG, config)
        return num_bytes

    def discard(self, lora_id: str) -> None:
        """Delete the files of an adapter that nothing has used."""
        shutil.rmtree(self.root / lora_id, ignore_errors=True)

    def touch(self, lora_id: str) -> None:
        """Let the files of a forgotten adapter stay for ``KEEP_S`` from now."""
        with suppress(FileNotFoundError), data_folder(self.root, but=FileNotFoundError):
            os.utime(self.root / lora_id)

    async def sweep(self) -> None:
        """Forget what was never ready, and delete files that no row has and no request needs."""
        old_s = time.time() - KEEP_S
        async with self.database.engine.begin() as connection:
            unready = (LoraRow.status == "loading", LoraRow.created_at_s < old_s)
            await connection.execute(delete(LoraRow).where(*unready))
            known = set(await connection.scalars(select(LoraRow.id)))
        await asyncio.to_thread(self._sweep_files, known, old_s)

    def _sweep_files(self, known: set[str], old_s: float) -> None:
        for folder in self.root.glob("lora_*"):
            with suppress(FileNotFoundError):  # another replica may sweep
                if folder.name not in known and folder.stat().st_mtime < old_s:
                    shutil.rmtree(folder, ignore_errors=True)


def new_lora_id() -> str:
    return f"lora_{uuid4().hex}"


def _with_loras(card: ModelCard, added: Mapping[str, Lora]) -> ModelCard:
    """Return ``card`` with further adapters, after the adapters of the configuration."""
    if card.runtime_loras is None or not added:
        return card
    own_names = {*(lora.name for lora in card.loras), *card.recipes}
    return replace(card, loras=(*card.loras, *(lora for name, lora in added.items() if name not in own_names)))


def _record(row: Any) -> LoraRecord:
    return LoraRecord(**{name: getattr(row, name) for name in LoraRecord.__dataclass_fields__})


def _write(path: Path, source: BinaryIO) -> int:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE), "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
