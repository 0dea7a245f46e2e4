"""Make the requests of batches, one batch at a time and several of its requests side by side."""

from __future__ import annotations

import asyncio
import codecs
import io
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from deployments.asyncio_tools import cancel, finish, taken, to_the_end
from deployments.batches.contents import Contents
from deployments.batches.records import BatchClaim, BatchRecord, BatchStore
from deployments.requests.request_errors import RequestError
from deployments.requests.untrusted import json_value
from deployments.requests.validation import unfolded

MAX_LINES = 10_000
MAX_ERRORS = 100
"""Errors of a file after which no more are looked for."""
NUM_RUNNING = 8
"""Requests of a batch that are made side by side."""
MAX_WAIT_S = 30.0
"""Longest time between two attempts at a request that was refused for lack of room."""
REFUSED = (429, 503)
"""Statuses after which a request is sent again."""
TURN_S = 60.0
"""Time without room for any request after which a batch leaves its turn to the next one that waits."""
ORPHAN_S = 3600.0
"""Time for which content without a record stays, since its record may be on its way. Interval of deletions."""
CONTENT = ("file-", "batch_")
"""How the names of files, and of folders of batches, begin."""
LINE_KEYS = {"custom_id", "method", "url", "body"}

Send = Callable[[str, str, Mapping[str, Any], str], Awaitable[tuple[int, Mapping[str, str], Any]]]
"""Make a request: path, hash of its key, body and ``Idempotency-Key`` to status, headers and body of the answer."""

logger = logging.getLogger("troupe.batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    """One request of a batch."""

    index: int
    """Number of the line in its file, from 0."""
    custom_id: str
    """The client's name for it, which no other line has."""
    text: bytes
    """The line. Thousands of parsed ones would take many times its memory."""

    @property
    def body(self) -> Mapping[str, Any]:
        """JSON body of the request."""
        body: Mapping[str, Any] = json_value(self.text)["body"]
        return body


@dataclass(kw_only=True, slots=True)
class BatchTurn:
    """The requests of a batch since it was claimed."""

    num_open: int = 0
    """Requests that are made or wait for room."""
    num_refused: int = 0
    """Requests that wait for room; they are open too."""
    answered_s: float = field(default_factory=time.monotonic)
    """Time of the last answer that is no refusal."""

    @property
    def is_over(self) -> bool:
        """True if there was room for none of them during ``TURN_S``."""
        is_stuck = 0 < self.num_open == self.num_refused
        return is_stuck and time.monotonic() > self.answered_s + TURN_S


class BatchRunner:
    """Works on the batches in ``store``. A replica that dies over one loses its lease, and another goes on.

    Each answer is a file as soon as it is there, so that what was made is not made again.
    """

    def __init__(
        self, store: BatchStore, contents: Contents, send: Send, poll_s: float, keep_s: float | None = None
    ) -> None:
        self._store, self._contents, self._send, self._poll_s = store, contents, send, poll_s
        self._keep_s = keep_s
        """Age at which ended batches are deleted; None keeps them."""
        self._orphans, self._looked_s = set[str](), -math.inf
        """Content without a record, and when it was looked for."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self._sweep()
                while claim := await taken(self._store.take(), self._store.give_back):
                    await self._work(claim)
                    await self._sweep()
            except Exception:  # the database or the storage may be away for a while
                logger.exception("no batch could be worked on")
            await asyncio.sleep(self._poll_s)

    async def _sweep(self) -> None:
        """Delete old batches, and content that had no record ``ORPHAN_S`` ago either.

        The database was away at its upload, or a replica died before it had deleted the parts of a batch's files.
        """
        if time.monotonic() - self._looked_s < ORPHAN_S:
            return
        if self._keep_s is not None:
            await self._store.remove_ended(time.time() - self._keep_s)
        names = {name for name in await asyncio.to_thread(self._contents.names, "") if name.startswith(CONTENT)}
        found = names - await self._store.content_names()
        for name in self._orphans & found:
            await asyncio.to_thread(self._contents.remove, name)
        self._orphans, self._looked_s = found, time.monotonic()

    async def _work(self, claim: BatchClaim) -> None:
        logger.info("a batch is worked on", extra={"batch_id": claim.batch.id, "status": claim.batch.status})
        try:
            turn = BatchTurn()
            working = asyncio.create_task(self._make(claim, turn))
            watching = asyncio.create_task(self._watch(claim, turn))
            try:
                await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
                    return
            finally:
                await cancel(working, watching)
            reason = watching.result()
            if reason == "no room":
                await self._store.give_back(claim, is_last=True)
            elif reason is not None:
                await self._finish(claim, reason)
        except asyncio.CancelledError:
            await to_the_end(self._store.give_back(claim))
            raise

    async def _watch(self, claim: BatchClaim, turn: BatchTurn) -> str | None:
        """Renew the lease. Return how the batch ends before its work is done; None if the lease is lost.

        "no room" if another batch is to have its turn.
        """
        while True:
            if time.time() > claim.batch.expires_at:
                return "expired"
            try:
                status = await self._store.renew(claim)
                is_next = turn.is_over and await self._store.is_any_free()
            except Exception:
                logger.warning("a batch's record could not be written", exc_info=True)
            else:
                if status is None or status == "cancelling":
                    return None if status is None else "cancelled"
                if is_next:
                    return "no room"
            await asyncio.sleep(min(self._poll_s, self._store.lease_s / 3))

    async def _make(self, claim: BatchClaim, turn: BatchTurn) -> None:
        batch = claim.batch
        if batch.status == "cancelling":
            await self._finish(claim, "cancelled")
            return
        data = await asyncio.to_thread(self._contents.read, batch.input_file_id)
        lines, batch.errors = await asyncio.to_thread(parse, data, batch)
        if batch.errors:
            await self._store.set_status(claim, "failed")
            return
        batch.num_total = len(lines)
        if not await self._store.set_status(claim, "in_progress", unless=("cancelling",)):
            return
        done = await asyncio.to_thread(self._contents.names, batch.id)
        batch.num_completed = sum(name.endswith(".out") for name in done)
        batch.num_failed = len(done) - batch.num_completed
        left = iter([line for line in lines if not {f"{line.index:05}.out", f"{line.index:05}.err"} & done])

        async def work() -> None:
            for line in left:
                turn.num_open += 1
                await self._answer(claim, line, turn)
                turn.num_open -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_RUNNING):
                group.create_task(work())
        await self._finish(claim, "completed")

    async def _answer(self, claim: BatchClaim, line: BatchLine, turn: BatchTurn) -> None:
        """Make one request and write its answer. Wait while there is no room for it."""
        batch = claim.batch
        body = {**line.body, "service_tier": "flex"}
        while True:
            status, headers, answer = await self._send(batch.endpoint, claim.key_hash, body, f"{batch.id}:{line.index}")
            if status not in REFUSED:
                break
            turn.num_refused += 1
            await asyncio.sleep(min(MAX_WAIT_S, float(headers.get("retry-after", 1))))
            turn.num_refused -= 1
        turn.answered_s = time.monotonic()
        response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": answer}
        is_good = status < 300 and not (isinstance(answer, dict) and answer.get("status") == "failed")
        result = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
        await finish(self._keep(batch, line, result, is_good=is_good))  # else what was made would be lost

    async def _keep(self, batch: BatchRecord, line: BatchLine, result: Mapping[str, Any], *, is_good: bool) -> None:
        name = f"{batch.id}/{line.index:05}.{'out' if is_good else 'err'}"
        await asyncio.to_thread(self._contents.write, name, json.dumps(result).encode() + b"\n")
        if is_good:
            batch.num_completed += 1
        else:
            batch.num_failed += 1

    async def _finish(self, claim: BatchClaim, status: Any) -> None:
        """Make files of all answers, and end the batch with ``status``."""
        batch = claim.batch
        if status == "completed" and not await self._store.set_status(claim, "finalizing", unless=("cancelling",)):
            status = "cancelled"
        names = sorted(await asyncio.to_thread(self._contents.names, batch.id))
        for ending, attribute in (("out", "output_file_id"), ("err", "error_file_id")):
            parts = [f"{batch.id}/{name}" for name in names if name.endswith(ending)]
            if parts and getattr(batch, attribute) is None:
                file_id = f"file-{uuid4().hex}"
                num_bytes = await asyncio.to_thread(self._contents.join, file_id, parts)
                name = f"{batch.id}_{'output' if ending == 'out' else 'error'}.jsonl"
                await self._store.add_file(claim.key_hash, name, "batch_output", num_bytes, file_id)
                setattr(batch, attribute, file_id)
        await finish(self._end(claim, status))  # else its answers would lie there for ever

    async def _end(self, claim: BatchClaim, status: Any) -> None:
        if await self._store.set_status(claim, status):
            with suppress(Exception):  # room alone
                await asyncio.to_thread(self._contents.remove, claim.batch.id)


def problem(message: str, line: int | None) -> dict[str, Any]:
    return {"code": "invalid_value", "message": message, "param": None, "line": line}


def parse(data: bytes | None, batch: BatchRecord) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return the requests in a file of JSON lines, and what is wrong with them. Blocks: not for an event loop."""
    if data is None:
        return [], [problem("there is no input file", None)]
    lines, errors, seen = list[BatchLine](), list[dict[str, Any]](), set[str]()
    for number, text in enumerate(io.BytesIO(data.removeprefix(codecs.BOM_UTF8)), 1):
        if not text.strip():
            continue
        if len(lines) == MAX_LINES:
            errors.append(problem(f"the input file holds more than {MAX_LINES} requests; send several files", None))
            break
        written = _written(text)
        if (message := _fault(written, batch, seen)) is None:
            seen.add(written["custom_id"])
            lines.append(BatchLine(index=len(lines), custom_id=written["custom_id"], text=text))
            continue
        errors.append(problem(message, number))
        if len(errors) == MAX_ERRORS:
            break
    if not lines and not errors:
        errors.append(problem("the input file holds no request", None))
    return lines, errors


def _written(text: bytes) -> Any:
    """Return the value of a line; None if it is no JSON."""
    try:
        return json_value(text)
    except ValueError:
        return None


def _fault(written: Any, batch: BatchRecord, seen: Collection[str]) -> str | None:
    """Return what is wrong with a line beside the ids ``seen``; None if it is a request of ``batch``."""
    if not isinstance(written, dict) or set(written) != LINE_KEYS or not isinstance(written["body"], dict):
        return f"a line must be an object with {', '.join(sorted(LINE_KEYS))}"
    if (written["method"], written["url"]) != ("POST", batch.endpoint):
        return f"method and url must be POST and {batch.endpoint}, the batch's endpoint"
    if not isinstance(written["custom_id"], str) or written["custom_id"] in seen:
        return "custom_id must be a text that no other line has"
    return "stream has no effect in a batch; leave it out" if _is_stream(written["body"]) else None


def _is_stream(body: Mapping[str, Any]) -> bool:
    with suppress(RequestError):  # which is the answer to the request
        body = unfolded(body)
    return bool(body.get("stream"))
