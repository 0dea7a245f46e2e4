"""Large bodies have their own limits, room in memory, nothing on the disk, and do not block the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import pytest

from deployments.batches.contents import Contents
from deployments.http import context
from deployments.http.admission import Memory
from deployments.http.errors import ApiError
from deployments.requests.bodies import EditBody
from deployments.requests.pictures.unpack import unpack
from deployments.requests.request_errors import RequestError
from deployments.requests.untrusted import STEP_BYTES, percent_decoded
from deployments.requests.validation import validated, validated_form
from pipelines.request import InputPictures
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import data_url, file_of, noise
from tests.support.patience import PATIENCE_S

EDITS, IMAGES = "/v1/images/edits", "/v1/images/generations"
FILE = file_of(noise(64, 64))
NUM_PIXEL_BYTES = 64 * 64 * 3
FORM: dict[str, Any] = {"data": {"prompt": "a"}, "files": {"image": FILE}}


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True)


async def test_pictures_may_be_larger_than_other_bodies(service: FakeService, tmp_path: Path) -> None:
    assert len(FILE) > 2000
    async with client_of(build(service, tmp_path, max_body_bytes=2000)) as client:
        assert (await client.post(EDITS, **FORM)).status_code == 200
        error_of(await client.post(IMAGES, json={"prompt": "a" * 2000}), 413)
    async with client_of(build(service, tmp_path, max_upload_bytes=3000)) as client:
        error = error_of(await client.post(EDITS, **FORM), 413)
        assert (error["code"], error["message"]) == ("body_too_large", "The body is larger than 3000 bytes")


async def test_where_no_model_takes_pictures_bodies_are_small(tmp_path: Path) -> None:
    async with client_of(build(FakeService(), tmp_path, max_body_bytes=2000)) as client:
        for path in (EDITS, "/v1/videos", "/v1/videos/sync"):
            error_of(await client.post(path, **FORM), 413)


async def test_nothing_of_a_form_goes_to_the_disk(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rollover(_: object) -> None:
        raise AssertionError("a file was made")

    monkeypatch.setattr(SpooledTemporaryFile, "rollover", rollover)
    large = file_of(noise(1024, 800))
    assert len(large) > 2 << 20
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(EDITS, data={"prompt": "a"}, files={"image": large})
        assert answer.status_code == 200, answer.text
        assert answer.json()["size"] == "80x64", "about the shape, and about the pixels of the model's own size"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and "sqlite" not in path.name] == []


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "chunked"])
async def test_bodies_take_room_beyond_what_all_may_have(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    """While the first request's pictures are unpacked, another finds no room; small bodies need none."""
    may_go_on = threading.Event()
    held: list[int] = []

    def slow(*args: Any) -> InputPictures:
        held.append(1)
        assert may_go_on.wait(PATIENCE_S)
        return unpack(*args)

    monkeypatch.setattr(context, "unpack", slow)
    request = httpx.Request("POST", f"http://localhost{EDITS}", **FORM)
    raw, kind = request.read(), request.headers["content-type"]
    app = build(service, tmp_path, max_body_bytes=2000, max_open_upload_bytes=2 * (len(raw) - 2000) - 1)
    async with client_of(app) as client:

        async def send() -> httpx.Response:
            return await client.post(EDITS, content=chunks(raw) if is_chunked else raw, headers={"Content-Type": kind})

        first = asyncio.create_task(send())
        await until(lambda: len(held) == 1)
        answer = await send()
        assert error_of(answer, 503)["code"] == "server_full"
        assert int(answer.headers["retry-after"]) > 0
        assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 200
        may_go_on.set()
        assert (await first).status_code == 200
        assert (await send()).status_code == 200, "there is room again"


async def test_unpacked_pictures_take_room_until_all_is_drawn(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, max_open_upload_bytes=2 * NUM_PIXEL_BYTES - 1)) as client:
        service.permits = asyncio.Semaphore(0)
        drawing = asyncio.create_task(client.post(EDITS, **FORM))
        await until(lambda: len(service.performed) == 1)
        assert error_of(await client.post(EDITS, **FORM), 503)["code"] == "server_full"
        service.permits = asyncio.Semaphore(100)
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing
        assert len(service.closed) == 1
        assert (await client.post(EDITS, **FORM)).status_code == 200


async def test_the_server_answers_while_pictures_are_unpacked(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, threads = threading.Event(), []

    def slow(*args: Any) -> InputPictures:
        threads.append(threading.current_thread())
        assert may_go_on.wait(PATIENCE_S)
        return unpack(*args)

    monkeypatch.setattr(context, "unpack", slow)
    async with client_of(build(service, tmp_path)) as client:
        edits = [asyncio.create_task(client.post(EDITS, **FORM)) for _ in range(5)]
        await until(lambda: len(threads) == 2)
        assert (await client.get("/health")).status_code == 200
        assert len(threads) == 2, "no more at a time"
        may_go_on.set()
        assert [(await edit).status_code for edit in edits] == [200] * 5
    assert threading.current_thread() not in threads


async def test_large_json_is_read_beside_the_event_loop(service: FakeService, tmp_path: Path) -> None:
    url = data_url(file_of(noise(512, 400)))
    assert len(url) > 1 << 18
    async with client_of(build(service, tmp_path)) as client:
        assert (await client.post(EDITS, json={"prompt": "a", "image": url})).status_code == 200
        error = error_of(await client.post(EDITS, json={"prompt": "a", "image": url, "typo": 1}), 400)
    assert error["code"] == "unknown_field"


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":[' + b"[]," * 400_000 + b"1]}",
        b'{"prompt":"a",' + b",".join(b'"a%d":1' % i for i in range(150_000)) + b"}",
        b'{"prompt":"a","extra_body":{' + b",".join(b'"a%d":1' % i for i in range(150_000)) + b"}}",
    ],
    ids=["values", "fields", "extra fields"],
)
async def test_small_values_take_no_memory_of_their_own(service: FakeService, tmp_path: Path, content: bytes) -> None:
    async with client_of(build(service, tmp_path)) as client:
        tracemalloc.start()
        answer = await client.post(EDITS, content=content, headers={"Content-Type": "application/json"})
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert error_of(answer, 400)["code"] == "bad_json"
    assert "too many values" in answer.json()["error"]["message"]
    assert peak_bytes < 5 * len(content)


def test_unknown_fields_cost_no_more_than_the_first() -> None:
    fields = {"prompt": "a", "negative_prompt": 1} | {f"a{i}": "1" for i in range(50_000)}
    for wrong, named in ((fields, "negative_prompt is 1"), (fields | {"negative_prompt": None}, "Unknown field 'a0'")):
        tracemalloc.start()
        with pytest.raises(RequestError, match=named):
            validated(EditBody, wrong)
        with pytest.raises(RequestError, match="Unknown field 'a0'"):
            validated_form(EditBody, {name: str(text) for name, text in wrong.items()})
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 16 << 20


async def test_percent_encoding_takes_no_memory_of_its_own(service: FakeService, tmp_path: Path) -> None:
    """Each escape is an object while it is decoded."""
    url = "data:image/png;base64," + "%41" * 400_000
    async with client_of(build(service, tmp_path)) as client:
        for body, content_type in (
            (b"prompt=" + b"%41" * 400_000, "application/x-www-form-urlencoded"),
            (json.dumps({"prompt": "a", "image": url}).encode(), "application/json"),
        ):
            tracemalloc.start()
            answer = await client.post(EDITS, content=body, headers={"Content-Type": content_type})
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            error_of(answer, 400)
            assert peak_bytes < 8 * len(body)


def test_percent_encoding_is_decoded_wherever_it_is_cut() -> None:
    for length in range(STEP_BYTES - 4, STEP_BYTES + 2):
        plain = b"a" * length
        for encoded, decoded in (
            (b"%2B%2b", b"++"),
            (b"%", b"%"),
            (b"%4", b"%4"),
            (b"%zz%41", b"%zzA"),
            (b"%%41", b"%A"),
        ):
            assert percent_decoded(plain + encoded + b"b") == plain + unquote_to_bytes(encoded + b"b")
            assert percent_decoded(plain + encoded) == plain + decoded
    assert percent_decoded(b"plain") == b"plain"


async def test_uploaded_files_take_room(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    held: list[int] = []
    write = Contents.write

    def slow(contents: Contents, name: str, data: bytes) -> None:
        held.append(1)
        assert may_go_on.wait(PATIENCE_S)
        write(contents, name, data)

    monkeypatch.setattr(Contents, "write", slow)
    form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": FILE}}
    app = build(service, tmp_path, max_body_bytes=2000, max_open_upload_bytes=2 * (len(FILE) - 2000) - 1)
    async with client_of(app) as client:
        first = asyncio.create_task(client.post("/v1/files", **form))
        await until(lambda: len(held) == 1)
        assert error_of(await client.post("/v1/files", **form), 503)["code"] == "server_full"
        may_go_on.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/files", **form)).status_code == 200, "there is room again"


def test_room_is_counted() -> None:
    memory = Memory(100)
    with memory.taken() as first, memory.taken() as second:
        first(60)
        second(40)
        with pytest.raises(ApiError, match="Too many pictures are being sent"):
            first(1)
        second(0)
    with memory.taken() as alone:
        alone(1000)
        with memory.taken() as other, pytest.raises(ApiError):
            other(1)
        alone(1000)
    with memory.taken() as first, memory.taken() as second:
        first(50)
        second(50)


async def test_what_is_refused_anyway_is_not_unpacked(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unpacked: list[int] = []

    def counted(*args: Any) -> InputPictures:
        num_unpacked.append(1)
        return unpack(*args)

    monkeypatch.setattr(context, "unpack", counted)
    async with client_of(build(service, tmp_path, max_open_pictures={"fake-edits": 1})) as client:
        service.permits = asyncio.Semaphore(0)
        drawing = asyncio.create_task(client.post(EDITS, **FORM))
        await until(lambda: len(service.performed) == 1)
        assert error_of(await client.post(EDITS, **FORM), 429)["code"] == "queue_full"
        service.permits = None
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing
        assert len(service.closed) == 1
        service.reasons["fake-edits"] = "loading"
        assert error_of(await client.post(EDITS, **FORM), 503)["code"] == "model_not_ready"
        assert len(num_unpacked) == 1
        service.reasons.clear()
        assert (await client.post(EDITS, **FORM)).status_code == 200
