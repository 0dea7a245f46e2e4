"""HTTP client of the API for the command line: streams pictures, polls clips."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from deployments.cli.local import http_client
from deployments.service.interface import Progress

POLL_S = 0.2
REQUEST_TIMEOUT_S = 3600.0
LOOK_TIMEOUT_S = 30.0
"""Timeout of a clip's record, of the gap between two parts of its file, and of its deletion."""
AWAY_S = 120.0
"""Time that a server may be unreachable while it makes a clip; after a restart it finishes the clip."""
PASSING = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""Status codes while the application starts, or restarts behind the door."""

Files = Sequence[tuple[str, tuple[str, bytes]]]
"""Pictures to upload: form field, file name and bytes of each."""
NO_FILES: Files = ()


class RefusedError(RuntimeError):
    """The server refused the request. The message is that of OpenAI's error body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished file."""

    data: bytes
    """The bytes of the file."""
    index: int = 0
    """Number of the picture in its request."""
    layer: int = 0
    """Number of the layer in its picture."""
    seed: int
    """The seed that made it, given or random."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage."""


class Client:
    """A connection to one server, whose ``url`` may end in /v1. ValueError names a proxy variable that is invalid."""

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        root = root_of(url)
        self._http = http_client(root, base_url=root, headers=headers, timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Return the models' cards. RefusedError if the server refuses, or is no Troupe server."""
        response = _checked(self._http.get("/v1/models"))
        cards = _json(response).get("data")
        if not isinstance(cards, list) or any("defaults" not in card for card in cards):
            raise _foreign_server(response)
        return cards

    def health(self) -> dict[str, str]:
        """Return "ready", or the reason why not, by model. RefusedError while no application answers."""
        response = self._http.get("/health")
        if "models" in (document := _json(response)):
            return dict(document["models"])
        _checked(response)
        raise _foreign_server(response)

    def clips(self, limit: int) -> list[dict[str, Any]]:
        """Return up to ``limit`` clips, the newest first."""
        return list(_checked(self._http.get("/v1/videos", params={"limit": limit})).json()["data"])

    def delete_clip(self, clip_id: str) -> None:
        _checked(self._http.delete(f"/v1/videos/{clip_id}"))

    def clip_file(self, clip_id: str) -> bytes:
        """Return the MP4 of a finished clip."""
        return _checked(self._http.get(f"/v1/videos/{clip_id}/content")).content

    def picture(self, body: Mapping[str, Any], files: Files = NO_FILES) -> Iterator[Progress | Result]:
        """Stream ``POST /v1/images/generations``, or ``/edits`` with ``files``. Steps are the sum over all pictures."""
        request = {**body, "stream": True, "stream_progress": True}
        num_pictures, steps = body.get("n", 1), dict[int, int]()
        path = "/v1/images/edits" if files else "/v1/images/generations"
        with self._http.stream("POST", path, **_content(request, files)) as response:
            if response.is_error:
                response.read()
            for event in _events(_checked(response)):
                match event.get("type"):
                    case "troupe.progress":
                        steps[event["image_index"]] = event["step"]
                        num_steps = num_pictures * event["of"]
                        yield Progress(step=sum(steps.values()), num_steps=num_steps, eta_s=event["eta_s"])
                    case "image_generation.completed" | "image_edit.completed":
                        yield Result(
                            data=base64.b64decode(event["b64_json"]),
                            index=event["image_index"],
                            layer=event.get("layer") or 0,
                            seed=event["seed"],
                            timings_s=_seconds(event.get("timings")),
                        )
                    case "error":
                        raise RefusedError(event["error"]["message"])

    def clip(self, body: Mapping[str, Any], files: Files = NO_FILES) -> Iterator[Progress | Result]:
        """Call ``POST /v1/videos``, then poll its progress. Closing the generator early deletes the clip.

        RuntimeError if the server is unreachable for more than ``AWAY_S``; the clip stays.
        """
        clip = _checked(self._http.post("/v1/videos", **_content(body, files))).json()
        url, started_s = f"/v1/videos/{clip['id']}", time.monotonic()
        try:
            while clip["status"] in ("queued", "in_progress"):
                time.sleep(POLL_S)
                clip = self._poll(url, clip["id"]).json()
                if clip["status"] == "queued":
                    started_s = time.monotonic()
                share, num_steps = clip["progress"] / 100, clip["num_inference_steps"]
                if share:  # unknown before the first step
                    left_s = (time.monotonic() - started_s) * (1 - share) / share
                    yield Progress(step=round(share * num_steps), num_steps=num_steps, eta_s=left_s)
        except (GeneratorExit, KeyboardInterrupt):
            with suppress(httpx.TransportError):  # an unreachable server keeps it
                self._http.delete(url, timeout=LOOK_TIMEOUT_S)
            raise
        if clip["status"] != "completed":
            raise RefusedError((clip.get("error") or {}).get("message", f"the clip is {clip['status']}"))
        data = self._poll(f"{url}/content", clip["id"]).content
        yield Result(data=data, seed=clip["seed"], timings_s=_seconds(clip.get("timings")))

    def _poll(self, url: str, clip_id: str) -> httpx.Response:
        """Return the answer of ``GET url``. RuntimeError if there is none for ``AWAY_S``."""
        end_s = time.monotonic() + AWAY_S
        while True:
            try:
                response = self._http.get(url, timeout=LOOK_TIMEOUT_S)
                if response.status_code not in PASSING:
                    return _checked(response)
                reason = _message(response)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() >= end_s:
                where = str(self._http.base_url).rstrip("/")
                raise RuntimeError(
                    f"no answer from {where} for {AWAY_S:g} s ({reason}); the clip is kept: once it is made, "
                    f"`troupe clips --url {where} --download {clip_id}` fetches it"
                )
            time.sleep(POLL_S)


def root_of(url: str) -> str:
    """Return ``url`` without the ``/v1`` that OpenAI's clients need at its end."""
    return url.rstrip("/").removesuffix("/v1")


def _content(body: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Return httpx's arguments: ``body`` as JSON, or as a form with ``files``."""
    if not files:
        return {"json": dict(body)}
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    return {"data": fields, "files": list(files)}


def _seconds(timings: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: value for name, value in (timings or {}).items() if name.endswith("_s") and value is not None}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event (HTML Living Standard, section 9.2)."""
    for line in response.iter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise RefusedError(_message(response))
    return response


def _foreign_server(response: httpx.Response) -> RefusedError:
    return RefusedError(f"the server at {response.url} is no Troupe server")


def _message(response: httpx.Response) -> str:
    """Return the server's error message, or else its status."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"


def _json(response: httpx.Response) -> dict[str, Any]:
    """Return the body's JSON object, empty if it is none."""
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
