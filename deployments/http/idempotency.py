"""Requests that are sent twice, and made once: ``Idempotency-Key``.

https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Header
from pydantic import BaseModel

from deployments.http.errors import ApiError
from deployments.http.files import sweep
from deployments.places import make_private, write_privately
from deployments.requests.request_errors import shown
from deployments.requests.rules import Requester

DAY_S = 86400.0
MAX_BYTES = 1 << 30
REPLAYED: Mapping[str, str] = {"Idempotent-Replayed": "true"}
OWN = re.compile(r"\.?[0-9a-f]{64}(\.[0-9a-f]{8})?")

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=255,
        description="Of a request that may be sent twice: within a day it is made once, and answered alike.",
    ),
]

logger = logging.getLogger("troupe.api")


@dataclass(kw_only=True, slots=True)
class Turn:
    """What is known of one request: ``answer`` is that of the same one before, None if there was none."""

    file: Path | None = None
    fingerprint: str = ""
    answer: bytes | None = None


class KnownRequests:
    """Answers in ``folder``, by the keys of their requests, for ``lifetime_s`` each and ``max_bytes`` in all.

    Only the server's user can read them: they are prompts and pictures.
    Of requests with one key that come to this replica at once the second waits for the first. An error is no answer:
    the same request may be sent again.
    """

    def __init__(self, folder: Path, lifetime_s: float = DAY_S, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._lifetime_s, self._max_bytes = folder, lifetime_s, max_bytes
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, path: str, requester: Requester, key: str | None, body: BaseModel) -> AsyncIterator[Turn]:
        """Yield what is known of a request with that ``body``. ``key`` is unique for one API key and ``path``.

        ApiError 409 if the key came with another body.
        """
        if not key:
            yield Turn()
            return
        scope = f"{requester.key}\0{path}\0{key}"
        name = hashlib.sha256(scope.encode(errors="surrogatepass")).hexdigest()
        async with self._turns.setdefault(name, asyncio.Lock()):
            fingerprint = await asyncio.to_thread(fingerprint_of, body)
            file = self._folder / name
            known, _, answer = (await asyncio.to_thread(self._read, file)).partition(b"\n")
            if known and known != fingerprint.encode():
                message = f"Idempotency-Key {shown(key)} came with another body before; give each request its own"
                raise ApiError(409, message, param="Idempotency-Key", code="idempotency_key_reused")
            yield Turn(file=file, fingerprint=fingerprint, answer=answer if known else None)

    async def keep(self, turn: Turn, answer: bytes) -> None:
        """Store the answer. If the disk refuses it, an equal request is run again."""
        if turn.file is not None:
            try:
                await asyncio.to_thread(self._write, turn.file, turn.fingerprint.encode() + b"\n" + answer)
            except OSError as error:
                logger.warning("an answer cannot be kept for its Idempotency-Key: %s", error)

    def _read(self, file: Path) -> bytes:
        try:
            return file.read_bytes() if time.time() - file.stat().st_mtime < self._lifetime_s else b""
        except FileNotFoundError:
            return b""

    def _write(self, file: Path, data: bytes) -> None:
        make_private(self._folder)
        own = [path for path in self._folder.glob("*") if OWN.fullmatch(path.name)]
        sweep(own, self._lifetime_s, self._max_bytes, len(data))
        write_privately(self._folder, file, data)


def fingerprint_of(body: BaseModel) -> str:
    """Return the SHA-256 of a body's fields, independent of its encoding (form boundaries differ each time)."""
    digest = hashlib.sha256()
    _feed(digest, body.model_dump(exclude_none=True))
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, Mapping):
        value = [part for name in sorted(value) for part in (name, value[name])]
    if isinstance(value, list | tuple):
        digest.update(b"[%d]" % len(value))
        for part in value:
            _feed(digest, part)
        return
    data = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
    digest.update(b"%d:" % len(data))
    digest.update(data)
