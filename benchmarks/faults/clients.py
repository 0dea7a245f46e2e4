"""HTTP clients of ``benchmarks.faults``: what each asks for and how long it stays, and how its visits end."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

import httpx

Kind = Literal["picture", "stream", "edit", "clip", "sync"]
"""``clip``: durable and polled. ``sync``: a clip in one request."""

SHARES: Mapping[Kind, float] = {"picture": 40, "stream": 40, "edit": 6, "clip": 8, "sync": 6}
STORM_SHARE = 0.02
"""Share of turns in which ``STORM_SIZE`` clients come at once, and each goes away."""
STORM_SIZE = 15
LEAVING_SHARE = 0.2
"""Share of the other clients that go away."""
LONGEST_STAY_S = 1.5
TIERS = ("default", "default", "priority", "flex")
SHORT_S, LONG_S = 20.0, 600.0
"""Deadlines of every second request under the policy ``deadline``. Some cannot be met while a gang is rebuilt."""

_SMALL = {"model": "flux-shapes", "prompt": "a red circle", "size": "64x64", "num_inference_steps": 8}
_USUAL = {"model": "flux-shapes", "prompt": "a large blue square on a white background", "num_inference_steps": 12}
_CLIP = {
    "model": "wan-shapes",
    "prompt": "a green triangle moves from left to right on a black background",
    "size": "32x32",
    "num_frames": 9,
    "num_inference_steps": 6,
}
_EDIT = {"model": "kontext-shapes", "prompt": "make the square red", "num_inference_steps": 6}
PICTURES = tuple({**body, "seed": seed} for seed in range(3) for body in (_SMALL, _USUAL))
BODIES: Mapping[Kind, tuple[Mapping[str, Any], ...]] = {
    "picture": PICTURES,
    "stream": PICTURES,
    "edit": tuple({**_EDIT, "seed": seed} for seed in range(2)),
    "clip": tuple({**_CLIP, "seed": seed} for seed in range(2)),
    "sync": tuple({**_CLIP, "seed": seed} for seed in range(2)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One request of a client."""

    kind: Kind
    number: int
    """Index among the ``BODIES`` of its kind."""
    key: int
    """Index of the client's API key."""
    tier: str = "default"
    deadline_s: float | None = None
    stays_s: float | None = None
    """The client goes away after that. None: it stays."""
    leaves_at: int | None = None
    """The client leaves the stream at that step."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent, without pictures."""
        urgency = {} if self.deadline_s is None else {"deadline_s": self.deadline_s}
        return {**BODIES[self.kind][self.number], "service_tier": self.tier, **urgency}


Turn = tuple[Visit, ...]
"""Visits that begin at the same time: one, or a storm."""


def drawn_turns(num_requests: int, policy: str, num_keys: int, seed: int) -> tuple[Turn, ...]:
    """Return turns of ``num_requests`` in all. The same arguments give the same turns."""
    random, turns, num_left = Random(seed), [], num_requests
    while num_left:
        is_storm = random.random() < STORM_SHARE
        num = min(num_left, STORM_SIZE if is_storm else 1)
        turns.append(tuple(_visit(random, policy, num_keys, leaves=is_storm) for _ in range(num)))
        num_left -= num
    return tuple(turns)


def _visit(random: Random, policy: str, num_keys: int, *, leaves: bool) -> Visit:
    (kind,) = random.choices(tuple(SHARES), tuple(SHARES.values()))
    leaves = leaves or random.random() < LEAVING_SHARE
    at_step = leaves and kind == "stream" and random.random() < 0.5
    in_time = policy == "deadline" and random.random() < 0.5
    return Visit(
        kind=kind,
        number=random.randrange(len(BODIES[kind])),
        key=random.randrange(num_keys),
        tier=random.choice(TIERS),
        deadline_s=random.choice((SHORT_S, LONG_S)) if in_time else None,
        stays_s=random.uniform(0.0, LONGEST_STAY_S) if leaves and not at_step else None,
        leaves_at=random.randint(1, 5) if at_step else None,
    )


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
