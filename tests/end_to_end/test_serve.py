"""``troupe serve`` has the right messages during its start, open ports, and end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deployments.support.commands import Command, assert_one_line, command, config_file, short_folder, troupe
from tests.deployments.support.live import IMAGES, PROMPT, config_of, picture, wait_until
from tests.end_to_end.conftest import CLIPS, LONG_CLIP, PICTURES
from tests.support.listening import listening
from tests.support.ports import own_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # two minutes: an application of its own

TIMEOUT_S = 120


@contextmanager
def watched(url: str) -> Iterator[list[httpx.Response]]:
    """Yield the answers of ``url``, polled during the block: each that differs from the one before it."""
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            time.sleep(0.05)
            try:
                answer = httpx.get(url, timeout=TIMEOUT_S)
            except httpx.TransportError:  # the port is not open yet, or no longer
                continue
            if not answers or answer.content != answers[-1].content:
                answers.append(answer)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def open_to_others(serve: Command) -> list[str]:
    """Return the listeners at addresses that other machines can reach."""
    return [f"{one.process} at {one.address}" for one in listening(serve.processes()) if one.address != "127.0.0.1"]


def end_under_way(serve: Command, client: httpx.Client) -> tuple[str, str]:
    """Send SIGTERM during a picture and a watched clip. Return the rest of both streams."""
    clip = client.post("/v1/videos", json={"prompt": PROMPT, **LONG_CLIP}).json()
    body = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 60, "stream": True, "stream_progress": True}
    with (
        client.stream("GET", f"/v1/videos/{clip['id']}/events") as watching,
        client.stream("POST", IMAGES, json=body) as painting,
    ):
        watch, paint = watching.iter_lines(), painting.iter_lines()
        next(watch)
        next(paint)
        serve.terminate()
        return "\n".join(paint), "\n".join(watch)


def assert_port_is_taken(config: str) -> None:
    """Check a second server's error, in its own process: this one may have a cluster from other tests."""
    with short_folder() as folder, command("serve", config, folder=folder) as second:
        assert second.wait() == 2
        assert re.search(r"troupe: .* is taken by another program.*--port", second.output, re.DOTALL), second.output


def test_from_start_to_end(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    served = {name: models[name] for name in (PICTURES, CLIPS)}
    port = own_port("served from start to end")
    url = f"http://127.0.0.1:{port}"
    with short_folder() as folder:
        config = config_file(config_of(served).with_http(port=port), folder)
        with watched(f"{url}/v1/models") as answers, command("serve", config, folder=folder) as serve:
            wait_until(lambda: answers != [], "the door answers")
            monkeypatch.setenv("TROUPE_DATA_DIR", str(folder / "data"))
            assert_one_line(troupe("status"), "The server is starting")
            serve.wait_for("Serving at")
            wait_until(lambda: answers[-1].status_code == 200, "the models are listed")
            assert open_to_others(serve) == []
            assert_port_is_taken(config)
            picture(url, seed=1)
            with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
                painted, watched_clip = end_under_way(serve, client)
            assert serve.wait() == 143, serve.output
            output = serve.output
    assert "image_generation.completed" in painted
    assert "server_stopping" in watched_clip
    for foreign in ("Traceback", "SIGTERM received", "(raylet)"):
        assert foreign not in output
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        assert answer.status_code == 200 or answer.json()["error"]["code"] in ("server_unavailable", "server_stopping")
