"""A chat endpoint rewrites prompts, in every kind of answer; if it fails, prompts stay unchanged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from pydantic import ValidationError

from deployments.asyncio_tools import cancel
from deployments.http.routes.batches import InnerRequests
from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.requests.fields import MAX_PROMPT_CHARS
from deployments.requests.handle import handle_request
from deployments.requests.prompt_enhancer import MAX_ANSWER_BYTES, PromptEnhancers, prompt_in
from deployments.usage.quotas import KeyLimits
from pipelines.media.metadata import MetadataWriter, settings_in
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.chat_endpoint import HANGS, HANGS_UP, ChatEndpoint, chat_endpoint, completion
from tests.deployments.support.fake_service import LAYERS, PICTURES, FakeService
from tests.deployments.support.files import data_url, file_of, noise
from tests.support.patience import PATIENCE_S

HEADER = "X-Troupe-Prompt-Enhancer"
GIVEN, REVISED = "a circle {kind} {prompt}", "a red circle in the evening sun"
ASKS = {"prompt": GIVEN, "enhance_prompt": True}
CONFIG = {"model": "writer", "template": "For {kind}s: {prompt} {end}", "parameters": {"temperature": 0.5}}


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with chat_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True, takes_apart=True, enhances_prompts=False)


def enhancers(endpoint: ChatEndpoint, service: FakeService, **config: Any) -> PromptEnhancers:
    fields: dict[str, Any] = {"url": endpoint.url, **CONFIG, **config}
    return PromptEnhancers(dict.fromkeys(service.cards(), PromptEnhancerConfig(**fields)), {"KEY": "secret"})


@pytest.fixture
def api(service: FakeService, endpoint: ChatEndpoint, tmp_path: Path) -> FastAPI:
    return build(service, tmp_path, enhancers=enhancers(endpoint, service, api_key_variable="KEY"))


def prompts(service: FakeService) -> list[str]:
    return [request.prompt for request in service.performed]


async def test_pictures(client: httpx.AsyncClient, service: FakeService, endpoint: ChatEndpoint) -> None:
    assert {one["enhances_prompts"] for one in (await client.get("/v1/models")).json()["data"]} == {False}
    plain = await client.post(IMAGES, json={"prompt": GIVEN})
    assert (HEADER in plain.headers, plain.json()["data"][0]["revised_prompt"]) == (False, None)
    service.performed.clear()
    answer = await client.post(IMAGES, json={**ASKS, "n": 2, "seed": 3})
    assert [one["revised_prompt"] for one in answer.json()["data"]] == [REVISED] * 2
    assert (answer.headers[HEADER], prompts(service)) == ("revised", [REVISED] * 2)
    message = {"role": "user", "content": f"For images: {GIVEN} {{end}}"}
    assert endpoint.bodies == [{"temperature": 0.5, "model": "writer", "messages": [message]}]
    assert (endpoint.keys, endpoint.paths) == (["Bearer secret"], ["/v1/chat/completions"])


async def test_the_revised_prompt_gives_the_same_request(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post(IMAGES, json={**ASKS, "seed": 3})
    fields = settings_in(MetadataWriter(level="full", software="Troupe").texts(service.performed[0]))
    assert fields is not None
    again = {name: fields[name] for name in ("prompt", "enhance_prompt", "seed", "model")}
    assert again == {"prompt": REVISED, "enhance_prompt": False, "seed": 3, "model": "fake-pictures"}
    answer = await client.post(IMAGES, json=again)
    assert HEADER not in answer.headers
    assert [(one.prompt, one.seed) for one in service.performed] == [(REVISED, 3)] * 2


async def test_a_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(IMAGES, json={**ASKS, "stream": True})
    name, event = sse(answer)[-1]
    assert (name, event["revised_prompt"]) == ("image_generation.completed", REVISED)
    assert (answer.headers[HEADER], prompts(service)) == ("revised", [REVISED])


async def test_edits(client: httpx.AsyncClient, service: FakeService) -> None:
    files = {"image": file_of(noise(32, 32))}
    form = {"prompt": GIVEN, "enhance_prompt": "true", "response_format": "url"}
    answer = await client.post("/v1/images/edits", data=form, files=files)
    assert answer.json()["data"][0]["revised_prompt"] == REVISED
    assert (answer.headers[HEADER], prompts(service)) == ("revised", [REVISED])


async def test_clips(client: httpx.AsyncClient, service: FakeService, endpoint: ChatEndpoint) -> None:
    made = await client.post("/v1/videos", json=ASKS)
    end = await finished(client, made.json()["id"])
    assert made.headers[HEADER] == "revised"
    assert {(one["prompt"], one["revised_prompt"]) for one in (made.json(), end)} == {(GIVEN, REVISED)}
    assert endpoint.bodies[0]["messages"][0]["content"].startswith("For videos: ")
    sync = await client.post("/v1/videos/sync", json=ASKS)
    assert (sync.headers[HEADER], prompts(service)) == ("revised", [REVISED] * 2)


async def test_a_clip_is_resumed_with_the_prompt_of_its_record(
    service: FakeService, endpoint: ChatEndpoint, tmp_path: Path
) -> None:
    service.permits = asyncio.Semaphore(0)
    async with client_of(build(service, tmp_path, enhancers=enhancers(endpoint, service))) as client:
        clip = await make(client, **ASKS)
    service.permits = None
    async with client_of(build(service, tmp_path, enhancers=enhancers(endpoint, service))) as client:
        end = await finished(client, clip["id"])
    assert (end["status"], end["prompt"], end["revised_prompt"]) == ("completed", GIVEN, REVISED)
    assert (set(prompts(service)), len(endpoint.bodies)) == ({REVISED}, 1)


@pytest.mark.parametrize("path", [IMAGES, "/v1/videos"])
async def test_batches(
    api: FastAPI, client: httpx.AsyncClient, service: FakeService, endpoint: ChatEndpoint, path: str
) -> None:
    send = InnerRequests(api, poll_s=0.01).send
    first, again = [await send(path, "", ASKS, "key") for _ in range(2)]
    assert first[0] == again[0] == 200
    revised = first[2]["data"][0]["revised_prompt"] if path == IMAGES else first[2]["revised_prompt"]
    assert (revised, prompts(service), len(endpoint.bodies)) == (REVISED, [REVISED], 1)


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("said", [None, False, True])
async def test_a_request_wins_over_the_default(endpoint: ChatEndpoint, default: bool, said: bool | None) -> None:
    service = FakeService(enhances_prompts=default)
    asked = enhancers(endpoint, service)
    fields = {"prompt": GIVEN, "enhance_prompt": said}
    request = await asked.enhanced(handle_request(service.cards(), "id", fields)[0])
    await asked.close()
    is_enhanced = default if said is None else said
    assert (request.revised_prompt, len(endpoint.bodies)) == (REVISED if is_enhanced else None, int(is_enhanced))
    assert (request.prompt, request.given_prompt) == ((REVISED, GIVEN) if is_enhanced else (GIVEN, None))


async def test_what_cannot_be_enhanced_is_refused(client: httpx.AsyncClient, tmp_path: Path) -> None:
    service = FakeService()
    async with client_of(build(service, tmp_path / "plain")) as plain:
        for path in (IMAGES, "/v1/videos"):
            answer = await plain.post(path, json=ASKS)
            error = error_of(answer, 400)
            assert (error["param"], "served without a prompt enhancer" in error["message"]) == ("enhance_prompt", True)
        assert (await plain.post(IMAGES, json={"prompt": "a", "enhance_prompt": False})).status_code == 200
    empty = {"model": "fake-layers", "image": data_url(file_of(noise(32, 32))), "enhance_prompt": True}
    error = error_of(await client.post("/v1/images/edits", json=empty), 400)
    assert (error["param"], "the prompt is empty" in error["message"]) == ("enhance_prompt", True)


async def test_an_empty_prompt_is_left_to_the_model(endpoint: ChatEndpoint) -> None:
    request = LAYERS.request(model="fake-layers", prompt="", enhance_prompt=True)
    assert await PromptEnhancers().enhanced(request) is request
    assert not endpoint.bodies


FAILURES: dict[str, tuple[int, bytes, str]] = {
    "slow": (HANGS, b"", "timeout"),
    "hangs up": (HANGS_UP, b"", "unreachable"),
    "a failure": (500, b"prompts cost money", "refused"),
    "a wrong key": (401, b"{}", "refused"),
    "a redirection": (307, b"", "refused"),
    "no JSON": (200, b"<html>", "invalid"),
    "another shape": (200, b'{"choices": []}', "invalid"),
    "no text": (200, completion(None), "invalid"),
    "spaces": (200, completion(" \n "), "invalid"),
    "a refusal to be shown": (200, completion("a", "content_filter"), "invalid"),
    "half a prompt": (200, completion("a red", "length"), "invalid"),
    "thoughts alone": (200, completion("<think>a circle?</think>\n"), "invalid"),
    "NUL": (200, completion("a\0b"), "invalid"),
    "a novel": (200, completion("a" * (MAX_PROMPT_CHARS + 1)), "invalid"),
    "a library": (200, completion("a" * MAX_ANSWER_BYTES), "invalid"),
}


def num_enhanced(outcome: str) -> float:
    labels = {"model": "fake-pictures", "outcome": outcome}
    return REGISTRY.get_sample_value("troupe_enhance_seconds_count", labels) or 0.0


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_leaves_the_prompt_as_it_came(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    endpoint.status, endpoint.content, outcome = FAILURES[case]
    timeout_s = 0.05 if endpoint.status == HANGS else PATIENCE_S
    before, asked = num_enhanced(outcome), enhancers(endpoint, FakeService(), timeout_s=timeout_s)
    request = PICTURES.request(model="fake-pictures", prompt=GIVEN, enhance_prompt=True, request_id="mine-1")
    with caplog.at_level(logging.WARNING, "troupe.flow"):
        later = await asked.enhanced(request)
    await asked.close()
    assert replace(later, waited_s=0.0, enhancer_outcome=None) == request
    assert later.enhancer_outcome == outcome
    assert (later.revised_prompt, num_enhanced(outcome), len(endpoint.bodies) < 2) == (None, before + 1, True)
    (line,) = [record.__dict__ for record in caplog.records if record.name == "troupe.flow"]
    assert (line["outcome"], line["model"], line["request_id"]) == (outcome, "fake-pictures", "mine-1")
    assert "money" not in str(line)


async def test_nobody_there(service: FakeService, tmp_path: Path) -> None:
    with chat_endpoint() as gone:
        pass
    async with client_of(build(service, tmp_path, enhancers=enhancers(gone, service))) as client:
        picture = await client.post(IMAGES, json={**ASKS, "stream": True})
        clip = await client.post("/v1/videos", json=ASKS)
        end = await finished(client, clip.json()["id"])
    assert picture.headers[HEADER] == clip.headers[HEADER] == "unreachable"
    assert sse(picture)[-1][1]["revised_prompt"] is None
    assert (end["status"], end["prompt"], end["revised_prompt"]) == ("completed", GIVEN, None)
    assert prompts(service) == [GIVEN] * 2


def test_a_long_answer_is_not_read() -> None:
    with pytest.raises(ValueError, match="the answer has more than"):
        prompt_in(b" " * MAX_ANSWER_BYTES + completion("a"))


def test_thoughts_are_no_part_of_the_prompt() -> None:
    assert prompt_in(completion(f"<think>\nA circle.\n</think>\n\n{REVISED}\n", None)) == REVISED


async def test_an_enhancer_leaves_time_until_the_deadline(endpoint: ChatEndpoint, service: FakeService) -> None:
    endpoint.status, asked = HANGS, enhancers(endpoint, service, timeout_s=120.0)
    request = PICTURES.request(model="fake-pictures", prompt=GIVEN, enhance_prompt=True, deadline_s=0.2, waited_s=0.1)
    async with asyncio.timeout(PATIENCE_S):
        later = await asked.enhanced(request)
    await asked.close()
    assert (later.prompt, later.enhancer_outcome) == (GIVEN, "timeout")
    assert later.waited_s >= request.waited_s + 0.05


def has(entries: Sized, num: int) -> bool:
    return len(entries) == num


@pytest.mark.parametrize(("path", "body"), [(IMAGES, ASKS), (IMAGES, {**ASKS, "stream": True}), ("/v1/videos", ASKS)])
async def test_a_key_at_its_limit_does_not_reach_the_endpoint(
    service: FakeService, endpoint: ChatEndpoint, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Its requests would take the connections of all others."""
    endpoint.status = HANGS
    rewriters, limits = enhancers(endpoint, service, timeout_s=120.0), (KeyLimits(max_concurrent=2),)
    async with client_of(build(service, tmp_path, enhancers=rewriters, key_limits=limits)) as client:
        waiting = [asyncio.create_task(client.post(path, json=body)) for _ in range(2)]
        await until(lambda: has(endpoint.bodies, 2))
        async with asyncio.timeout(PATIENCE_S / 2):
            assert error_of(await client.post(path, json=body), 429)["code"] == "key_limit"
        await cancel(*waiting)
    assert has(endpoint.bodies, 2)


async def test_a_client_that_leaves_ends_the_wait(service: FakeService, endpoint: ChatEndpoint, tmp_path: Path) -> None:
    endpoint.status = HANGS
    with serving(build(service, tmp_path, enhancers=enhancers(endpoint, service, timeout_s=120.0))) as url:
        for num, path in enumerate((IMAGES, "/v1/videos"), 1):
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                asking = asyncio.create_task(client.post(path, json=ASKS))
                await until(partial(has, endpoint.bodies, num))
                await cancel(asking)
            await until(partial(has, endpoint.left, num))
        assert httpx.get(f"{url}/v1/videos").json()["data"] == []
    assert service.performed == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": "localhost:11434"}, "must be a URL of http:// or https://"),
        ({"url": "file:///etc/passwd"}, "must be a URL"),
        ({"url": "http://user:word@host/v1"}, "without user"),
        ({"url": "http://host/v1?key=a"}, "without user, query"),
        ({"url": "http://host:99999/v1"}, "must be a URL"),
        ({"url": "http://[::1/v1"}, "must be a URL"),
        ({"model": ""}, "at least 1 character"),
        ({"template": "Rewrite it"}, "must hold {prompt} once"),
        ({"template": "{prompt} {prompt}"}, "must hold {prompt} once"),
        ({"api_key_variable": "sk-live-1"}, "not the key"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"parameters": {"stream": True}}, "stream cannot be set here"),
        ({"modell": "x"}, "not permitted"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        PromptEnhancerConfig(**{"url": "http://host/v1", "model": "m", **fields})
    assert said in str(refusal.value)


def test_without_a_template_the_servers_own_is_used() -> None:
    body = PromptEnhancerConfig(url="http://host/v1", model="m").body("a {kind} {prompt}", "video")
    assert body["messages"][0]["content"].endswith("\n\nPrompt: a {kind} {prompt}")
    assert "text-to-video" in body["messages"][0]["content"]


@pytest.mark.parametrize("url", ["http://host/v1", "http://host/v1/", "http://host/v1/chat/completions"])
def test_both_forms_of_a_url(url: str) -> None:
    assert PromptEnhancerConfig(url=url, model="m").endpoint == "http://host/v1/chat/completions"
