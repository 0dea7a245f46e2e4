"""HTTP clients of ``benchmarks.faults``, and how each of their visits ends."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx

from benchmarks.faults.visits import Kind, Visit

End = Literal["right", "refused", "left", "cut", "wrong_bytes", "no_reason", "hung"]
"""``refused``: with one of ``REASONS``. ``cut``: the connection ended without an answer. ``no_reason``: an answer
without a reason."""

REASONS = frozenset(
    ("queue_full", "too_late", "server_full", "server_unavailable", "server_lost", "model_not_ready", "gang_broken")
)
REASONS_OF_CLIPS = frozenset(("too_late", "gang_broken"))
"""Reasons for which a durable clip may fail after it was accepted: its deadline, or two gangs killed under it."""
PATHS: Mapping[Kind, str] = {
    "picture": "/v1/images/generations",
    "stream": "/v1/images/generations",
    "edit": "/v1/images/edits",
    "clip": "/v1/videos",
    "sync": "/v1/videos/sync",
}
LONGEST_PAUSE_S = 20.0
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a visit ended. Times are those of ``time.monotonic``."""

    kind: Kind
    end: End
    code: str = ""
    """The reason of a refusal."""
    note: str = ""
    """Explanation for people."""
    began_s: float = 0.0
    ended_s: float = 0.0
    retry_s: float = 0.0


def refusal(visit: Visit, response: httpx.Response) -> Outcome:
    """Return the outcome of an answer other than 200."""
    try:
        body = response.json()
    except ValueError:
        body = None
    is_error = in_shape(body) and response.status_code >= httpx.codes.BAD_REQUEST
    code = str(body["error"]["code"]) if is_error else ""
    cannot_be_in_time = response.status_code == httpx.codes.BAD_REQUEST and visit.deadline_s is not None
    end: End = "refused" if is_error and (code in REASONS or cannot_be_in_time) else "no_reason"
    retry_s = float(response.headers.get("Retry-After", 0))
    note = f"{response.status_code} {response.text}"[:300]
    return Outcome(kind=visit.kind, end=end, code=code, note=note, retry_s=retry_s)


def in_shape(body: object) -> bool:
    """Return whether ``body`` is an error in OpenAI's shape."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys()


@dataclass(kw_only=True, slots=True)
class Clients:
    """Clients with the API ``keys`` ("" for none)."""

    http: httpx.AsyncClient
    keys: tuple[str, ...]
    hang_s: float
    """A visit that takes longer hangs."""
    source: bytes = b""
    """The picture for edits."""
    references: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """Expected bytes by path and number of body: those of the first answer."""
    clips: dict[str, int] = field(default_factory=dict)
    """Clips that were neither deleted nor seen to end, with the index of their key."""

    async def visit(self, visit: Visit) -> Outcome:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self.hang_s):
                outcome = await self._stay(visit)
        except TimeoutError:
            outcome = Outcome(kind=visit.kind, end="hung", note=f"{visit} had no answer after {self.hang_s:g} s")
        except httpx.TransportError as error:
            outcome = Outcome(kind=visit.kind, end="cut", note=repr(error))
        return replace(outcome, began_s=began_s, ended_s=time.monotonic())

    async def _stay(self, visit: Visit) -> Outcome:
        if visit.kind == "clip":
            return await self._clip(visit)
        ask = self._stream if visit.kind == "stream" else self._answer
        try:
            async with asyncio.timeout(visit.stays_s) as stay:
                return await ask(visit)
        except TimeoutError:
            if not stay.expired():
                raise
            return Outcome(kind=visit.kind, end="left")

    async def _answer(self, visit: Visit) -> Outcome:
        """Ask for a picture, an edited one, or a clip, in one answer."""
        body = visit.body
        if visit.kind == "edit":
            url = f"data:image/png;base64,{base64.b64encode(self.source).decode()}"
            body["images"] = [{"image_url": url}]
        response = await self.http.post(PATHS[visit.kind], json=body, headers=self.headers(visit.key))
        if response.status_code != httpx.codes.OK:
            return refusal(visit, response)
        is_clip = visit.kind == "sync"
        return self._compared(visit, response.content if is_clip else picture_of(response.json()["data"][0]))

    async def _stream(self, visit: Visit) -> Outcome:
        body = {**visit.body, "stream": True, "stream_progress": True, "partial_images": 1}
        event: dict[str, Any] = {}
        async with self.http.stream("POST", PATHS["stream"], json=body, headers=self.headers(visit.key)) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return refusal(visit, response)
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                if visit.leaves_at is not None and event.get("step", 0) >= visit.leaves_at:
                    return Outcome(kind="stream", end="left")
        match event.get("type"):
            case "image_generation.completed":
                return self._compared(visit, picture_of(event))
            case "error":
                code = str(event["error"].get("code")) if in_shape(event) else ""
                end: End = "refused" if code in REASONS else "no_reason"
                return Outcome(kind="stream", end=end, code=code, note=json.dumps(event)[:300])
        return Outcome(kind="stream", end="cut", note=f"the stream ended after {event.get('type')}")

    async def _clip(self, visit: Visit) -> Outcome:
        response = await self.http.post(PATHS["clip"], json=visit.body, headers=self.headers(visit.key))
        if response.status_code != httpx.codes.OK:
            return refusal(visit, response)
        clip_id = str(response.json()["id"])
        self.clips[clip_id] = visit.key
        if visit.stays_s is None:
            return await self._finished(visit, clip_id)
        await asyncio.sleep(visit.stays_s)
        await self._patiently("DELETE", f"/v1/videos/{clip_id}", visit.key)
        if (await self._patiently("GET", f"/v1/videos/{clip_id}", visit.key)).status_code != httpx.codes.NOT_FOUND:
            return Outcome(kind="clip", end="no_reason", note=f"{clip_id} was deleted, and is still there")
        del self.clips[clip_id]
        return Outcome(kind="clip", end="left")

    async def _finished(self, visit: Visit, clip_id: str) -> Outcome:
        while True:
            response = await self._patiently("GET", f"/v1/videos/{clip_id}", visit.key)
            record = response.json()
            if response.status_code != httpx.codes.OK or record["status"] == "failed":
                code = str((record.get("error") or {}).get("code"))
                end: End = "refused" if code in REASONS_OF_CLIPS else "no_reason"
                self.clips.pop(clip_id)
                return Outcome(kind="clip", end=end, code=code, note=response.text[:300])
            if record["status"] == "completed":
                content = await self._patiently("GET", f"/v1/videos/{clip_id}/content", visit.key)
                self.clips.pop(clip_id)
                return self._compared(visit, content.content)
            await asyncio.sleep(POLL_S)

    async def _patiently(self, method: str, path: str, key: int) -> httpx.Response:
        """Ask until the server is there: the clip was accepted."""
        while True:
            try:
                response = await self.http.request(method, path, headers=self.headers(key))
                if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    return response
            except httpx.TransportError:
                pass
            await asyncio.sleep(POLL_S)

    def _compared(self, visit: Visit, data: bytes) -> Outcome:
        kept = self.references.setdefault((PATHS[visit.kind].removesuffix("/sync"), visit.number), data)
        if kept == data:
            return Outcome(kind=visit.kind, end="right")
        return Outcome(kind=visit.kind, end="wrong_bytes", note=f"{visit}: {len(data)} bytes, {len(kept)} before")

    def headers(self, key: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[key]}"} if self.keys[key] else {}


def picture_of(answer: Mapping[str, Any]) -> bytes:
    return base64.b64decode(answer["b64_json"])
