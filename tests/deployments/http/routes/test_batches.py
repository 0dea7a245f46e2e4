"""Batches of the official client run pictures and clips of one file, over restarts, once each."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.batches import runner
from deployments.batches.contents import Contents
from deployments.batches.records import BatchRecord, BatchStore
from deployments.batches.runner import MAX_LINES, parse
from deployments.clips.storage import StorageLostError
from deployments.database.database import Database
from deployments.requests.untrusted import MAX_VALUES
from deployments.usage.api_keys import hash_of
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos"
BATCH = BatchRecord(id="batch_1", endpoint=IMAGES, input_file_id="file-1", created_at=0, expires_at=1)
LINE = b'"method": "POST", "url": "/v1/images/generations", "body": {}}\n'


def lines(url: str, *bodies: dict[str, Any]) -> bytes:
    requests = ({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies))
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    give_up_s = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).completed_at is None and time.monotonic() < give_up_s:
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {one["custom_id"]: one["response"] for one in found}


def assert_ids_are_logged(service: FakeService, *answers: dict[str, dict[str, Any]]) -> None:
    """Check that those of refused requests, which made nothing, are ids too."""
    ids = {one["request_id"] for several in answers for one in several.values()}
    logged = {one.request_id.split("-")[0] for one in service.performed[1:]}
    (refused,) = ids - logged
    assert (logged < ids, refused[:4]) == (True, "req_")


def assert_files_are_listed(client: openai.OpenAI, given: list[str]) -> None:
    files = [one.id for one in client.files.list(limit=2)]
    assert len(files) == len(given) + 3, "three came out"
    assert [one.id for one in client.files.list(limit=2, order="asc")] == files[::-1]
    assert [one.id for one in client.files.list(limit=1, purpose="batch", order="asc")] == given


def test_pictures_and_clips_of_the_official_client(service: FakeService, tmp_path: Path) -> None:
    with (
        serving(build(service, tmp_path, api_keys=("alpha",), sends_request_id=False)) as url,  # as behind Ray's proxy
        openai.OpenAI(base_url=f"{url}/v1", api_key="alpha", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        alone = client.images.generate(prompt="a", extra_body={"seed": 1})
        pictures = lines(IMAGES, {"prompt": "a", "seed": 1}, {"prompt": "b", "seed": -5}, {"prompt": "c", "n": 2})
        asked = {IMAGES: pictures, VIDEOS: lines(VIDEOS, {"prompt": "a"}, {"prompt": "b", "seconds": "2"})}
        batches = {}
        for endpoint, content in asked.items():
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            assert (file.bytes, client.files.retrieve(file.id).filename) == (len(content), "in.jsonl")
            batch = client.batches.create(
                input_file_id=file.id,
                endpoint=endpoint,  # type: ignore[arg-type]
                completion_window="24h",
                metadata={"of": "me"},
            )
            batches[endpoint] = ended(client, batch.id)
        batch = batches[IMAGES]
        assert (batch.status, batch.metadata, batch.request_counts) == ("completed", {"of": "me"}, batch.request_counts)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert alone.data is not None
        assert good["r0"]["body"]["data"][0]["b64_json"] == alone.data[0].b64_json, "the bytes of one alone"
        assert (set(good), len(good["r2"]["body"]["data"])) == ({"r0", "r2"}, 2)
        assert (bad["r1"]["status_code"], bad["r1"]["body"]["error"]["param"]) == (400, "seed")
        clips = results(client, batches[VIDEOS].output_file_id)
        assert_ids_are_logged(service, good, clips, bad)
        assert {one["body"]["status"] for one in clips.values()} == {"completed"}
        assert client.videos.download_content(clips["r1"]["body"]["id"]).read()[4:8] == b"ftyp"
        assert [one.id for one in client.batches.list()] == [batches[VIDEOS].id, batches[IMAGES].id]
        assert_files_are_listed(client, [batches[endpoint].input_file_id for endpoint in asked])
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)
    tiers = Counter((one.kind, one.service_tier, one.key == hash_of("alpha")) for one in service.performed)
    assert tiers == {("image", "default", True): 1, ("image", "flex", True): 3, ("video", "flex", True): 2}


async def start(client: httpx.AsyncClient, content: bytes, endpoint: str = IMAGES) -> dict[str, Any]:
    file = await client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
    assert file.status_code == 200, file.text
    answer = await client.post("/v1/batches", json={"input_file_id": file.json()["id"], "endpoint": endpoint})
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def end(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (batch := (await client.get(f"/v1/batches/{batch_id}")).json())["status"] in (
            "validating",
            "in_progress",
            "finalizing",
            "cancelling",
        ):
            await asyncio.sleep(0.02)
    found: dict[str, Any] = batch
    return found


async def test_a_batch_goes_on_after_a_restart_and_makes_nothing_twice(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: dict[str, Any] = {"clips": {"database_url": database_url}}
    monkeypatch.setattr(runner, "NUM_RUNNING", 1)
    first = FakeService(permits=asyncio.Semaphore(4))  # enough for one of them
    async with client_of(build(first, tmp_path, **place)) as client:
        batch = await start(client, lines(IMAGES, *({"prompt": "a", "seed": seed} for seed in range(3))))
        await until(lambda: len(first.finished) == 1)
        await until(lambda: len(list((tmp_path / "batches" / batch["id"]).glob("*.out"))) == 1)
    made = next(one.seed for one in first.performed if one.request_id in first.finished)
    one, two = FakeService(), FakeService()
    async with client_of(build(one, tmp_path, **place)) as client, client_of(build(two, tmp_path, **place)):
        batch = await end(client, batch["id"])
        answer = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [json.loads(line)["custom_id"] for line in answer.text.splitlines()] == ["r0", "r1", "r2"]
    assert sorted(request.seed for request in one.performed + two.performed) == sorted({0, 1, 2} - {made})
    assert not (tmp_path / "batches" / batch["id"]).exists()


async def test_a_batch_of_a_key_that_was_taken_away_makes_nothing_more(tmp_path: Path) -> None:
    first = FakeService(permits=asyncio.Semaphore(0))
    async with client_of(build(first, tmp_path, api_keys=("alpha",))) as client:
        client.headers["Authorization"] = "Bearer alpha"
        batch = await start(client, lines(IMAGES, {"prompt": "a"}))
        await until(lambda: len(first.performed) == 1)
    later = FakeService()
    async with client_of(build(later, tmp_path, api_keys=("beta",), share_between_keys=True)) as client:
        client.headers["Authorization"] = "Bearer beta"
        ended = await end(client, batch["id"])
        assert (ended["status"], ended["request_counts"]["failed"]) == ("completed", 1)
        (line,) = (await client.get(f"/v1/files/{ended['error_file_id']}/content")).text.splitlines()
    assert json.loads(line)["response"]["body"]["error"]["code"] == "invalid_api_key"
    assert later.performed == []


async def test_ids_that_are_none_are_unknown(tmp_path: Path, database_url: str) -> None:
    async with client_of(build(FakeService(), tmp_path, clips={"database_url": database_url})) as client:
        answer = await client.post("/v1/batches", json={"input_file_id": "file-\0", "endpoint": IMAGES})
        assert error_of(answer, 404)["param"] == "input_file_id"


async def test_a_stop_while_a_batch_ends_leaves_no_parts_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_status, is_ended, stops = BatchStore.set_status, asyncio.Event(), asyncio.Event()

    async def set_slowly(store: BatchStore, claim: Any, status: Any, unless: Any = ()) -> bool:
        is_set = await set_status(store, claim, status, unless)
        if status == "completed":
            is_ended.set()
            await stops.wait()
        return is_set

    monkeypatch.setattr(BatchStore, "set_status", set_slowly)
    async with client_of(build(FakeService(), tmp_path)) as client:
        batch = await start(client, lines(IMAGES, {"prompt": "a"}))
        await is_ended.wait()
        asyncio.get_running_loop().call_later(0.1, stops.set)  # while the application stops
    assert not (tmp_path / "batches" / batch["id"]).exists()


async def test_a_cancelled_batch_keeps_what_is_made(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "NUM_RUNNING", 1)
    service.permits = asyncio.Semaphore(4)
    batch = await start(client, lines(IMAGES, *({"prompt": "a", "seed": seed} for seed in range(3))))
    await until(lambda: len(service.finished) == 1)
    while (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] < 1:
        await asyncio.sleep(0.02)
    assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] in ("cancelling", "cancelled")
    batch = await end(client, batch["id"])
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)
    assert len((await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()) == 1
    await until(lambda: len(service.closed) == 1)


async def test_requests_without_room_are_made_later(service: FakeService, tmp_path: Path) -> None:
    service.reasons["fake-pictures"] = "loading"
    async with client_of(build(service, tmp_path)) as client:
        batch = await start(client, lines(IMAGES, {"prompt": "a"}))
        while (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] != "in_progress":
            await asyncio.sleep(0.02)
        service.reasons.clear()
        assert (await end(client, batch["id"]))["request_counts"]["completed"] == 1


async def test_a_batch_that_is_late_expires(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    store = BatchStore(database=database, lease_s=0.0)
    batch = BatchRecord(id="batch_1", endpoint=IMAGES, input_file_id="file-1", created_at=0, expires_at=1)
    await store.add(batch, "")
    first = await store.take()
    await asyncio.sleep(0.01)
    second = await store.take()
    assert first is not None
    assert second is not None
    assert await store.renew(first) is None, "its lease is another's"
    assert await store.set_status(second, "expired")
    found = await store.get("batch_1", None)
    assert found is not None
    assert (found.status, found.is_open, await store.take()) == ("expired", False, None)
    await database.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (b"{}", "a line must be an object with body, custom_id, method, url"),
        (b"no json", "a line must be an object"),
        (lines(VIDEOS, {}), "method and url must be POST and /v1/images/generations"),
        (lines(IMAGES, {}) * 2, "custom_id must be a text that no other line has"),
        (lines(IMAGES, {"stream": True}), "stream has no effect in a batch"),
        (lines(IMAGES, {"extra_body": {"stream": True}}), "stream has no effect in a batch"),
        (lines(IMAGES, {"true_cfg_scale": math.nan}), "a line must be an object"),
        (lines(IMAGES, {"prompt": "\ud800"}), "a line must be an object"),
        (b"[" * 100_000, "a line must be an object"),
        (lines(IMAGES, {"lora": [[]] * MAX_VALUES}), "a line must be an object"),
        (lines(IMAGES, {}) * (MAX_LINES + 1), "custom_id must be a text that no other line has"),
        (b"".join(b'{"custom_id": "%d", %s' % (i, LINE) for i in range(MAX_LINES + 1)), "more than 10000 requests"),
    ],
)
def test_files_that_hold_no_batch(content: bytes, message: str) -> None:
    _, errors = parse(content, BATCH)
    assert message in errors[0]["message"]


def test_a_file_of_small_lines_takes_no_memory_of_its_own() -> None:
    tracemalloc.start()
    for content in (b"1\n" * 200_000, b"\n" * 200_000):
        lines_of, errors = parse(content, BATCH)
        assert (lines_of, len(errors)) == ([], 100 if content[:1] == b"1" else 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 << 20


def test_files_of_other_programs_are_read() -> None:
    content = b"\xef\xbb\xbf" + lines(IMAGES, {"prompt": "a"}).replace(b"\n", b"\r\n\r\n")
    (line,), errors = parse(content, BATCH)
    assert (line.custom_id, line.body, errors) == ("r0", {"prompt": "a"}, [])


async def test_what_is_refused(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=("alpha", "beta"))) as client:
        alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
        client.headers.update(alpha)
        batch = await start(client, b"{}")
        failed = await end(client, batch["id"])
        assert (failed["status"], failed["errors"]["data"][0]["line"]) == ("failed", 1)
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['input_file_id']}"):
            assert (await client.get(path)).status_code == 200
            error_of(await client.get(path, headers=beta), 404)
            error_of(await client.get(path, headers={"Authorization": "Bearer other"}), 401)
        body = {"input_file_id": batch["input_file_id"], "endpoint": IMAGES}
        error_of(await client.post("/v1/batches", json=body, headers=beta), 404)
        for wrong in ({"endpoint": "/v1/chat"}, {"completion_window": "1h"}, {"nonsense": 1}, {"metadata": {"a": 1}}):
            error_of(await client.post("/v1/batches", json=body | wrong), 400)
        for form in ({"purpose": "vision"}, {"purpose": "batch", "nonsense": "1"}):
            error_of(await client.post("/v1/files", files={"file": ("a", b"{}")}, data=form), 400)
        error_of(await client.post("/v1/files", data={"purpose": "batch"}, files={"x": b""}), 400)
        clip = await client.post("/v1/files", files={"file": ("a.mp4", b"{}")}, data={"purpose": "user_data"})
        error = error_of(await client.post("/v1/batches", json=body | {"input_file_id": clip.json()["id"]}), 400)
        assert (error["param"], "the purpose user_data" in error["message"]) == ("input_file_id", True)
    assert service.performed == []


async def test_a_key_stores_as_much_as_it_may(tmp_path: Path) -> None:
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    async with client_of(build(FakeService(), tmp_path, api_keys=("alpha", "beta"), max_stored_bytes=10)) as client:
        first, second = [(await client.post("/v1/files", headers=alpha, **form)).json()["id"] for _ in range(2)]
        error = error_of(await client.post("/v1/files", headers=alpha, **form), 409)
        assert (error["code"], "files of 8 are here; all may have 10" in error["message"]) == ("too_many_files", True)
        assert (await client.post("/v1/files", headers=beta, **form)).is_success
        assert (await client.delete(f"/v1/files/{first}", headers=alpha)).is_success
        assert (await client.post("/v1/files", headers=alpha, **form)).is_success
        assert (await client.get(f"/v1/files/{second}/content", headers=alpha)).content == b"0123"


async def test_uploads_at_once_take_no_more_than_one_after_the_other(tmp_path: Path, database_url: str) -> None:
    """They arrive at two replicas."""
    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    rules: dict[str, Any] = {"clips": {"database_url": database_url}, "max_stored_bytes": 10}
    async with (
        client_of(build(FakeService(), tmp_path, **rules)) as one,
        client_of(build(FakeService(), tmp_path, **rules)) as other,
    ):
        answers = await asyncio.gather(*(client.post("/v1/files", **form) for client in (one, other) for _ in range(4)))
        refused = [answer for answer in answers if not answer.is_success]
        assert [error_of(answer, 409)["code"] for answer in refused] == ["too_many_files"] * 6
        kept = {answer.json()["id"] for answer in answers if answer.is_success}
        assert {file["id"] for file in (await one.get("/v1/files")).json()["data"]} == kept
    assert {path.name for path in (tmp_path / "batches").iterdir()} == kept, "refused ones are not left there"


async def test_an_upload_without_a_record_leaves_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit would count it, and no client could delete it."""

    async def add_file(*_: object) -> None:
        raise StorageLostError("the database does not answer")

    monkeypatch.setattr(BatchStore, "add_file", add_file)
    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    async with client_of(build(FakeService(), tmp_path)) as client:
        error_of(await client.post("/v1/files", **form), 503)
    assert list((tmp_path / "batches").iterdir()) == []


async def test_content_whose_record_is_neither_written_nor_deleted_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StorageLostError("the database does not answer")

    def names() -> set[str]:
        return {path.name for path in (tmp_path / "batches").iterdir()}

    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    async with client_of(build(FakeService(), tmp_path)) as client:
        kept = (await client.post("/v1/files", **form)).json()["id"]
        with monkeypatch.context() as patch:
            patch.setattr(BatchStore, "add_file", fail)
            patch.setattr(BatchStore, "remove_file", fail)
            error_of(await client.post("/v1/files", **form), 503)
        assert len(names()) == 2
    (parts := tmp_path / "batches" / f"batch_{'0' * 32}").mkdir()  # its replica died before it could delete them
    (parts / "00000.out").write_bytes(b"{}")
    monkeypatch.setattr(runner, "ORPHAN_S", 0.0)
    async with client_of(build(FakeService(), tmp_path)):
        async with asyncio.timeout(PATIENCE_S):
            while names() != {kept}:
                await asyncio.sleep(0.01)


async def test_ended_batches_are_deleted_after_a_time(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files stay, and so do open batches."""
    monkeypatch.setattr(runner, "ORPHAN_S", 0.0)
    async with client_of(build(service, tmp_path)) as client:
        first = await end(client, (await start(client, lines(IMAGES, {"prompt": "a"})))["id"])
        service.permits = asyncio.Semaphore(0)
        second = await start(client, lines(IMAGES, {"prompt": "a"}, {"prompt": "b"}))
        await asyncio.sleep(0.1)  # several sweeps
        assert [one["id"] for one in (await client.get("/v1/batches")).json()["data"]] == [second["id"], first["id"]]
    async with client_of(build(service, tmp_path, keep_batches_s=0.01)) as client:
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get(f"/v1/batches/{first['id']}")).is_success:
                await asyncio.sleep(0.01)
        assert [one["id"] for one in (await client.get("/v1/batches")).json()["data"]] == [second["id"]]
        assert (await client.get(f"/v1/files/{first['output_file_id']}/content")).is_success


async def test_an_upload_that_is_cancelled_while_it_is_written_leaves_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread goes on."""
    write, begun, go_on = Contents.write, threading.Event(), threading.Event()

    def write_late(contents: Contents, name: str, data: bytes) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        write(contents, name, data)
        written.set()

    written = threading.Event()
    monkeypatch.setattr(Contents, "write", write_late)
    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    async with client_of(build(FakeService(), tmp_path)) as client:
        upload = asyncio.create_task(client.post("/v1/files", **form))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        upload.cancel()
        await asyncio.wait({upload}, timeout=0.1)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await upload
        await asyncio.to_thread(written.wait, PATIENCE_S)
    assert list((tmp_path / "batches").iterdir()) == []


@pytest.mark.parametrize("database_answers", [True, False])
async def test_a_file_whose_record_is_written_without_an_answer_has_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_answers: bool
) -> None:
    """Otherwise the database removes the record, and both are gone."""
    add_file = BatchStore.add_file

    async def add_silently(*arguments: Any) -> None:
        await add_file(*arguments)
        raise StorageLostError("the database does not answer")

    async def remove_file(*_: object) -> None:
        raise StorageLostError("the database does not answer")

    monkeypatch.setattr(BatchStore, "add_file", add_silently)
    if not database_answers:
        monkeypatch.setattr(BatchStore, "remove_file", remove_file)
    form: Any = {"files": {"file": ("a.mp4", b"0123")}, "data": {"purpose": "user_data"}}
    async with client_of(build(FakeService(), tmp_path)) as client:
        error_of(await client.post("/v1/files", **form), 503)
        listed = (await client.get("/v1/files")).json()["data"]
        contents = [(await client.get(f"/v1/files/{file['id']}/content")).content for file in listed]
    assert contents == ([] if database_answers else [b"0123"])
    assert len(list((tmp_path / "batches").iterdir())) == len(contents)
