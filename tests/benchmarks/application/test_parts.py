"""Results of the parts from a server's answers. Values that several parts need are measured once."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.application import parts
from benchmarks.application.client import PROMPT, Client, medians, timing
from benchmarks.application.parts import PARTS, ClipShape, Visit, is_for
from benchmarks.serving import application
from benchmarks.serving.settings import find_parts

STAGES = "queue;dur=1.0, encode;dur=2.5, denoise;dur={denoise}, decode;dur=4, total;dur=10.5"


class Server(httpx.MockTransport):
    """Answers with the prompt as bytes. Denoising takes 6 ms, and 9 ms for prompts of a number above 7."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__(self._answer)
        self.asked: list[dict[str, Any]] = []
        self._defaults = defaults
        self.status, self.kind, self.bad_clip = 200, "image", 0
        self.eta: dict[str, str] = {}

    def visit(self, logs: Path = Path()) -> Visit:
        client = Client("http://server", side=64)
        client._transport = self
        application: Any = SimpleNamespace(logs=logs)
        return Visit(application=application, client=client)

    def _clip(self, body: dict[str, Any]) -> httpx.Response:
        self.asked.append(body)
        data = json.dumps(body).encode() + (b"others" if len(self.asked) == self.bad_clip else b"")
        headers = {"server-timing": STAGES.format(denoise=len(self.asked)), "content-type": "video/mp4"}
        return httpx.Response(self.status, content=iter([data]), headers=headers)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "full", "kind": self.kind, "defaults": self._defaults}]})
        if request.url.path.endswith("videos/sync"):
            return self._clip(json.loads(request.content))
        is_edit = request.url.path.endswith("edits")
        body = {"prompt": "edit"} if is_edit else json.loads(request.content)
        self.asked.append(body)
        _, _, number = body["prompt"].partition("number ")
        denoise = 9 if number and int(number) > 7 else 6
        answer = {"data": [{"b64_json": base64.b64encode(body["prompt"].encode()).decode()}]}
        headers = {"server-timing": STAGES.format(denoise=denoise), **self.eta}
        return httpx.Response(self.status, content=iter([json.dumps(answer).encode()]), headers=headers)


def test_timings_are_read_from_the_answer() -> None:
    one = timing(httpx.Response(200, headers={"server-timing": STAGES.format(denoise=3)}))
    assert one == {"queue": 1.0, "encode": 2.5, "denoise": 3.0, "decode": 4.0, "total": 10.5}
    other = {**one, "denoise": 5.0}
    assert medians([one, other, other])["denoise"]["median"] == 5.0


def test_pictures_alone_are_drawn_once_for_all_parts() -> None:
    server = Server()
    visit = server.visit()
    found = parts.pictures(visit)
    assert found["same_bytes"] is True
    assert found["answered_ms"]["num"] == 5
    assert found["eta_error"] is None
    assert (found["first"]["denoise"], found["new_prompt"]["denoise"]["num"], found["picture"]["total"]["num"]) == (
        6,
        8,
        5,
    )
    assert len(server.asked) == 1 + 5 + 8
    overlap = parts.overlap(visit)["overlap"]
    assert len(server.asked) == 14 + 12
    assert len({body["prompt"] for body in server.asked}) == 1 + 8 + 12, "a prompt of its own for each"
    assert overlap["beside_alone"] == {"encode": 1.0, "denoise": 1.5, "decode": 1.0}
    assert overlap["denoise"]["num"] == 12
    assert overlap["lone_s_per_picture"] == 0.0105
    assert overlap["s_per_picture"] > 0


def test_memory_is_seen_at_rest_and_while_pictures_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look finds the most."""
    monkeypatch.setattr(parts, "IDLE_S", 0.0)
    server, gib = Server(), iter((1, *[2] * 100))
    visit = server.visit()
    visit.application.memory = lambda: SimpleNamespace(pss_bytes=next(gib) << 30, num_processes=7)  # type: ignore
    visit.application.cpu_share = lambda over_s: 0.25  # type: ignore
    found = parts.footprint(visit)["footprint"]
    assert (found["memory_gib"], found["num_processes"], found["idle_cores"]) == ({"idle": 1.0, "peak": 2.0}, 7, 0.25)
    assert len(server.asked) == visit.at_once


def test_a_client_asks_for_its_model_and_finds_its_card() -> None:
    server = Server()
    client = Client("http://server", model="full")
    client._transport = server
    client.paint()
    assert (server.asked[0]["model"], client.card()["id"]) == ("full", "full")


def test_other_bytes_are_said() -> None:
    visit = Server().visit()
    visit.first = ({}, b"others")
    assert parts.pictures(visit)["same_bytes"] is False


def test_sizes_formats_and_edits() -> None:
    server = Server(max_pictures=1)
    visit = server.visit()
    assert parts.half_side(visit)["half_side"]["total"]["num"] == 5
    assert {body["size"] for body in server.asked} == {"32x32"}
    assert parts.double_side(visit)["double_side"]["total"]["num"] == 2
    assert server.asked[-1]["size"] == "128x128"
    assert parts.jpeg(visit)["jpeg"]["decode"]["median"] == 4.0
    assert server.asked[-1]["output_format"] == "jpeg"
    assert parts.edit(visit)["edit"]["total"]["num"] == 4
    assert server.asked[-1]["prompt"] == "edit"
    visit.at_once = 3
    found = parts.at_once(visit)["at_once"]
    assert (found["num"], found["total_ms"]["num"], found["mean_ms"]) == (3, 3, 10)
    assert sorted(body["seed"] for body in server.asked[-3:]) == list(range(3))
    server.eta = {"X-Troupe-Eta": "0.0084"}  # a fifth before the actual 10.5 ms
    assert parts.at_once(visit)["at_once"]["eta_error"] == {"median": 0.2, "lowest": 0.2, "highest": 0.2, "num": 3}
    assert parts.edit(Server().visit()) == {"edit": None}


def test_clips_of_several_shapes() -> None:
    """The sixth request is the second one of the second shape."""
    server = Server()
    server.kind, server.bad_clip = "video", 6
    visit = server.visit()
    visit.clips = (ClipShape.of("832x480x17@8"), ClipShape.of("832x480x81"))
    short, long = parts.clips(visit)["clips"].values()
    assert (short["first"]["denoise"], short["clip"]["denoise"]["median"], short["clip"]["total"]["num"]) == (1, 3, 3)
    assert (short["same_bytes"], long["same_bytes"]) == (True, False)
    assert short["answered_ms"]["num"] == 3
    size = {"prompt": PROMPT, "seed": 1, "size": "832x480"}
    assert server.asked[:4] == [{**size, "num_frames": 17, "num_inference_steps": 8}] * 4
    assert server.asked[4:] == [{**size, "num_frames": 81}] * 4
    assert short["bytes"] == len(json.dumps(server.asked[0]))


def test_parts_are_for_models_that_make_such_things() -> None:
    for kind, expected in (
        ("image", [name for name in PARTS if name != "clips"]),
        ("video", ["clips", "zero", "kill"]),
    ):
        server = Server()
        server.kind = kind
        visit = server.visit()
        assert [name for name in PARTS if is_for(name, visit)] == expected


def test_a_clip_is_made_again_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = {"time": "2026-11-23T00:00:00+00:00", "message": "gang is ready", "model": "full", "pids": [7]}
    (tmp_path / "worker-1.err").write_text(json.dumps(gang))
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    server = Server()
    server.kind, server.bad_clip = "video", 3
    visit = server.visit(tmp_path)
    assert parts.kill(visit)["after_a_kill"]["same_bytes"] is True
    assert server.asked == [{"prompt": PROMPT, "seed": 1}] * 2
    assert parts.kill(visit)["after_a_kill"]["same_bytes"] is False, "the third comes out otherwise"


def test_a_request_waits_until_no_gang_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = {"time": "2026-11-23T00:00:00+00:00", "message": "gang is ready", "model": "full", "pids": [6, 7]}
    (tmp_path / "worker-1.err").write_text(json.dumps(gang))
    running = [True, True, False]
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: pid == 7 and bool(running) and running.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server()
    found = parts.zero(server.visit(tmp_path))["from_zero"]
    assert (running, len(server.asked), len(found["answered_s"]), found["same_bytes"]) == ([], 4, 3, True)
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)
    monkeypatch.setattr(application, "GONE_WITHIN_S", 0.0)
    with pytest.raises(TimeoutError, match=r"denoiser\.autoscaling says when"):
        parts.zero(server.visit(tmp_path))


def test_the_last_rank_of_the_newest_gang_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"time": f"2026-11-23T00:00:0{number}+00:00", "message": "gang is ready", "model": model, "pids": pids}
        for number, (model, pids) in enumerate([("full", [1, 2]), ("full", [3, 4]), ("another", [5, 6])])
    ]
    (tmp_path / "worker-1.err").write_text("\n".join(map(json.dumps, lines)))
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    found = parts.kill(Server().visit(tmp_path))["after_a_kill"]
    assert (found["same_bytes"], killed) == (True, [(4, signal.SIGKILL)])


def test_no_picture_is_an_error() -> None:
    server = Server()
    server.status = 503
    with pytest.raises(RuntimeError, match="no picture or clip, but 503"):
        parts.pictures(server.visit())


def test_parts_have_an_order_of_their_own() -> None:
    assert list(find_parts(PARTS, "kill,pictures")) == ["pictures", "kill"]
    assert list(PARTS)[-1] == "kill", "a later part would wait for another gang"
    with pytest.raises(ValueError, match="unknown part 'gif'; known: pictures, jpeg"):
        find_parts(PARTS, "gif")
