"""Requests that are sent twice, and made once: ``Idempotency-Key``.

https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy import and_, delete, func, or_, select, update

from deployments.asyncio_tools import cancel, taken, to_the_end
from deployments.clips.storage import UNAVAILABLE
from deployments.database.database import Database, insert_into, row_of
from deployments.database.tables import AnswerRow
from deployments.http.errors import ApiError
from deployments.requests.request_errors import shown
from deployments.requests.rules import Requester

DAY_S = 86400.0
MAX_BYTES = 1 << 30
REPLAYED: Mapping[str, str] = {"Idempotent-Replayed": "true"}
LEASE_S = 30.0
"""Clocks of machines must differ by less."""
LOOK_EVERY_S = 0.2
"""Interval of looks whether another replica has an answer."""

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=255,
        description="Key of a request: within a day, the same key and body run once and get the same answer.",
    ),
]

logger = logging.getLogger("troupe.api")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """State of a request with an ``Idempotency-Key``."""

    name: str = ""
    """Digest of key, API key and path; empty: the request has no key."""
    fingerprint: str = ""
    """Digest of the body, by which another one is refused."""
    answer: bytes | None = None
    """The earlier answer to the same request; None if there is none."""
    owner: str = ""
    """Holder of the turn, if this call works on the request."""


class KnownRequests:
    """Answers in the database, by the keys of their requests, for a day each and ``max_bytes`` in all.

    If two requests with one key come at once, on any replicas, the second waits for the first. Errors are not stored:
    the same request may be sent again. If a replica dies over a request, the next one may begin after ``lease_s``.
    """

    def __init__(self, database: Database, max_bytes: int = MAX_BYTES, lease_s: float = LEASE_S) -> None:
        self._database, self._max_bytes, self._lease_s = database, max_bytes, lease_s
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, path: str, requester: Requester, key: str | None, body: BaseModel) -> AsyncIterator[Turn]:
        """Yield what is known of a request with that ``body``. ``key`` is unique for one API key and ``path``.

        ApiError 409 if the key came with another body.
        """
        if not key:
            yield Turn()
            return
        name = name_of(path, requester, key)
        async with self._turns.setdefault(name, asyncio.Lock()):  # here the next one need not look again and again
            fingerprint = await asyncio.to_thread(fingerprint_of, body)
            turn = await self._wait_for_turn(Turn(name=name, fingerprint=fingerprint))
            if turn.fingerprint != fingerprint:
                message = f"Idempotency-Key {shown(key)} came with another body before; give each request its own"
                raise ApiError(409, message, param="Idempotency-Key", code="idempotency_key_reused")
            if turn.owner:
                async with self._held(turn):
                    yield turn
            else:
                yield turn

    async def keep(self, turn: Turn, answer: bytes) -> None:
        """Store the answer. If the database refuses it, an equal request is run again."""
        if not turn.name:
            return
        values = {"answer": answer, "num_bytes": len(answer), "owner": "", "created_at_s": time.time()}
        kept = update(AnswerRow).where(AnswerRow.name == turn.name)
        if turn.owner:  # else the answer before names a clip that is gone
            kept = kept.where(AnswerRow.owner == turn.owner)
        try:
            await self._make_room(len(answer))
            async with self._database.engine.begin() as connection:
                await connection.execute(kept.values(**values))
        except UNAVAILABLE as error:
            logger.warning("an answer cannot be kept for its Idempotency-Key: %s", error)

    async def _wait_for_turn(self, turn: Turn) -> Turn:
        """Return the turn with the answer, or with this call as its owner, once no other works on the request."""
        while True:
            if mine := await taken(self._take(replace(turn, owner=secrets.token_hex(16))), self._forget):
                return mine
            query = select(AnswerRow.fingerprint, AnswerRow.answer).where(AnswerRow.name == turn.name)
            async with self._database.engine.connect() as connection:
                row = (await connection.execute(query)).one_or_none()
            if row is not None and row.answer is not None:
                return replace(turn, fingerprint=row.fingerprint, answer=row.answer)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _take(self, turn: Turn) -> Turn | None:
        """Return the turn if it is this call's: nothing is known of the request, or it was long ago."""
        now_s, engine = time.time(), self._database.engine
        values = {"fingerprint": turn.fingerprint, "owner": turn.owner, "lease_until_s": now_s + self._lease_s}
        values |= {"created_at_s": now_s, "num_bytes": 0, "answer": None}
        is_old = AnswerRow.created_at_s <= now_s - DAY_S
        is_free = or_(is_old, and_(AnswerRow.answer.is_(None), AnswerRow.lease_until_s < now_s))
        insert = insert_into(AnswerRow, engine).values(name=turn.name, **values)
        take = insert.on_conflict_do_update(index_elements=["name"], set_=values, where=is_free)
        return None if await row_of(engine, take.returning(AnswerRow.name)) is None else turn

    @asynccontextmanager
    async def _held(self, turn: Turn) -> AsyncIterator[None]:
        """Renew the lease inside the block. Forget the request at its end, unless its answer was kept."""
        renewing = asyncio.create_task(self._renew(turn))
        try:
            yield
        finally:
            await cancel(renewing)
            await to_the_end(self._forget(turn))

    async def _renew(self, turn: Turn) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            renewed = update(AnswerRow).where(AnswerRow.name == turn.name, AnswerRow.owner == turn.owner)
            with suppress(*UNAVAILABLE):
                async with self._database.engine.begin() as connection:
                    await connection.execute(renewed.values(lease_until_s=time.time() + self._lease_s))

    async def _forget(self, turn: Turn) -> None:
        """Delete the row if it still has an owner. Without the database, its lease ends by itself."""
        with suppress(*UNAVAILABLE):
            async with self._database.engine.begin() as connection:
                mine = (AnswerRow.name == turn.name, AnswerRow.owner == turn.owner)
                await connection.execute(delete(AnswerRow).where(*mine))

    async def _make_room(self, num_new_bytes: int) -> None:
        """Delete answers that are too old, then the oldest, until ``num_new_bytes`` more fit."""
        size = func.sum(AnswerRow.num_bytes)
        # The newest first: how many bytes there are up to each answer.
        up_to = size.over(order_by=AnswerRow.created_at_s.desc()).label("up_to")
        sums = select(AnswerRow.name, up_to).where(AnswerRow.answer.is_not(None)).subquery()
        excess = select(sums.c.name).where(sums.c.up_to > self._max_bytes - num_new_bytes)
        async with self._database.engine.begin() as connection:
            old = AnswerRow.created_at_s <= time.time() - DAY_S
            await connection.execute(delete(AnswerRow).where(old))
            if (await connection.scalar(select(size)) or 0) + num_new_bytes > self._max_bytes:
                await connection.execute(delete(AnswerRow).where(AnswerRow.name.in_(excess)))


def name_of(path: str, requester: Requester, key: str) -> str:
    """Return the name of a request: a key is unique for one API key and path."""
    scope = f"{requester.key}\0{path}\0{key}"
    return hashlib.sha256(scope.encode(errors="surrogatepass")).hexdigest()


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
