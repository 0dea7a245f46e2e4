"""A small HTTP client of the API, for the command line: streams a picture, follows a clip."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployments.cli.local import http_client
from deployments.studio.interface import Progress

POLL_S = 0.2
REQUEST_TIMEOUT_S = 3600.0
LOOK_TIMEOUT_S = 30.0
"""For a clip's record, and between two parts of its file; and for a clip to be deleted, where somebody leaves."""
AWAY_S = 120.0
"""For how long a server that makes a clip may be away, and start again: it finishes the clip then."""
PASSING = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""Of an application that starts, and of the door where what is behind it starts again."""

Files = Sequence[tuple[str, tuple[str, bytes]]]
"""Pictures that go along: for each its field, its name and its bytes."""
NO_FILES: Files = ()


class RefusedError(RuntimeError):
    """The server refused: OpenAI's error body, as one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Finished bytes, the seed that made them, and seconds by stage. ``index`` counts the pictures of one request, and
    ``layer`` the layers of one picture."""

    data: bytes
    index: int = 0
    layer: int = 0
    seed: int
    timings_s: Mapping[str, float] = field(default_factory=dict)


def kinds_of(model: Mapping[str, Any]) -> Sequence[str]:
    """Return what a model makes, by its card: its own kind first."""
    return list(model["kinds"])


class Client:
    """Talks to one Troupe server, whose ``url`` may end in /v1 or not. Use as a context manager.

    ValueError names a proxy of the environment that cannot be used.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        root = root_of(url)
        self._http = http_client(root, base_url=root, headers=headers, timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of the models. RefusedError of a server that is another one, or refuses."""
        response = _checked(self._http.get("/v1/models"))
        cards = _json(response).get("data")
        if not isinstance(cards, list) or any("defaults" not in card for card in cards):
            raise _no_troupe(response)
        return cards

    def health(self) -> dict[str, str]:
        """Return, for each model, "ready" or why it is not. RefusedError while nobody there knows of models."""
        response = self._http.get("/health")
        if "models" in (document := _json(response)):
            return dict(document["models"])
        _checked(response)
        raise _no_troupe(response)

    def clips(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest clips, by the newest first."""
        return list(_checked(self._http.get("/v1/videos", params={"limit": limit})).json()["data"])

    def delete_clip(self, clip_id: str) -> None:
        _checked(self._http.delete(f"/v1/videos/{clip_id}"))

    def clip_file(self, clip_id: str) -> bytes:
        """Return the MP4 of a clip that is finished."""
        return _checked(self._http.get(f"/v1/videos/{clip_id}/content")).content

    def picture(self, body: Mapping[str, Any], files: Files = NO_FILES) -> Iterator[Progress | Result]:
        """Do ``POST /v1/images/generations``, or with ``files`` ``POST /v1/images/edits``, as a stream: steps of all
        pictures together, and each result."""
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
        """Do ``POST /v1/videos``, then polls its progress. A caller who leaves early deletes the clip.

        A server that is away meanwhile is waited for. RuntimeError if it is for longer than ``AWAY_S``; the clip stays.
        """
        clip = _checked(self._http.post("/v1/videos", **_content(body, files))).json()
        url, started_s = f"/v1/videos/{clip['id']}", time.monotonic()
        try:
            while clip["status"] in ("queued", "in_progress"):
                time.sleep(POLL_S)
                clip = self._awaited(url, clip["id"]).json()
                if clip["status"] == "queued":
                    started_s = time.monotonic()
                share, num_steps = clip["progress"] / 100, clip["num_inference_steps"]
                if share:  # before the first step, nobody knows how long it will take
                    left_s = (time.monotonic() - started_s) * (1 - share) / share
                    yield Progress(step=round(share * num_steps), num_steps=num_steps, eta_s=left_s)
        except (GeneratorExit, KeyboardInterrupt):
            with suppress(httpx.TransportError):  # a server that is away keeps it
                self._http.delete(url, timeout=LOOK_TIMEOUT_S)
            raise
        if clip["status"] != "completed":
            raise RefusedError((clip.get("error") or {}).get("message", f"the clip is {clip['status']}"))
        data = self._awaited(f"{url}/content", clip["id"]).content
        yield Result(data=data, seed=clip["seed"], timings_s=_seconds(clip.get("timings")))

    def _awaited(self, url: str, clip_id: str) -> httpx.Response:
        """Return what ``GET url`` answers, once a server does that is away for ``AWAY_S`` at most."""
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
    """Return ``url`` without the ``/v1`` that clients of OpenAI's want at its end."""
    return url.rstrip("/").removesuffix("/v1")


def _content(body: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Return ``body`` as httpx is to send it: as JSON, or as a form with its ``files``."""
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


def _no_troupe(response: httpx.Response) -> RefusedError:
    return RefusedError(f"what answers at {response.url} is no Troupe server")


def _message(response: httpx.Response) -> str:
    """Return why the server refused, in its own words if it has some."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"


def _json(response: httpx.Response) -> dict[str, Any]:
    """Return the object that the body is; an empty one if it is none."""
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
