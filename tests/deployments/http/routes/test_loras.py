"""Clients add adapters: access, restarts, and refusals that leave no trace."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.clips.storage import StorageLostError
from deployments.http.settings import ApiLimits
from deployments.lora_store import KEEP_S, LoraStore
from deployments.service.interface import ModelUnavailableError
from pipelines.lora.source import LORA_FILE, PEFT_CONFIG, AdapterError, LoraLimits
from pipelines.request import Lora
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.test_keys import by
from tests.deployments.support.fake_service import FakeService

LORAS, IMAGES, MODEL = "/v1/loras", "/v1/images/generations", "fake-pictures"
FILE = b"an adapter, as far as this service knows"


@pytest.fixture
def service() -> FakeService:
    return FakeService(runtime_loras=LoraLimits(max_loras=3))


async def add(
    client: httpx.AsyncClient, key: str = "", data: bytes = FILE, config: bytes | None = None, **fields: Any
) -> httpx.Response:
    files = {"file": ("ink.safetensors", data)} | ({} if config is None else {"config": ("config.json", config)})
    form = {"model": MODEL, "name": "ink", **{name: str(value).lower() for name, value in fields.items()}}
    return await client.post(LORAS, data=form, files=files, headers=by(key) if key else {})


async def draw(client: httpx.AsyncClient, key: str = "", **fields: Any) -> httpx.Response:
    headers = by(key) if key else {}
    return await client.post(IMAGES, json={"prompt": "a", "model": MODEL, **fields}, headers=headers)


async def names(client: httpx.AsyncClient, key: str) -> list[str]:
    answer = await client.get(LORAS, headers=by(key))
    return [f"{one['name']}{'*' if one['is_own'] else ''}" for one in answer.json()["data"]]


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def failing(failure: Exception) -> Callable[[Lora], None]:
    """Return a function that checks an adapter's files, and then fails to load it."""

    def fail(lora: Lora) -> None:
        assert (Path(lora.folder) / LORA_FILE).is_file()
        raise failure

    return fail


def folders(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / "loras").glob("*")}


async def test_requests_name_it_until_it_is_deleted_over_restarts(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path)) as client:
        answer = await add(client, config=b"{}", scale=0.5, part="transformer")
        assert answer.status_code == 201, answer.text
        entry = answer.json()
        expected = {"object": "lora", "model": MODEL, "name": "ink", "scale": 0.5, "part": "transformer"}
        expected |= {"bytes": len(FILE), "status": "ready", "shared": True, "is_own": True}
        assert entry == expected | {"id": entry["id"], "created_at": entry["created_at"]}
        (lora,) = service.loaded.values()
        folder = Path(lora.folder)
        assert lora == Lora(name="ink", scale=0.5, part="transformer", folder=str(tmp_path / "loras" / entry["id"]))
        assert (folder / LORA_FILE).read_bytes() == FILE
        assert (folder / PEFT_CONFIG).read_bytes() == b"{}"
        assert {(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {0o600}
    async with client_of(build(service, tmp_path)) as client:
        assert (await client.get(LORAS)).json() == {"object": "list", "data": [entry]}
        assert (await client.get(f"{LORAS}/{entry['id']}")).json() == entry
        model = (await client.get(f"/v1/models/{MODEL}")).json()
        assert (model["loras"], model["takes_loras"]) == ([{"name": "ink", "scale": 0.5}], True)
        assert (await client.get(f"/v1/models/{MODEL}:ink")).json()["parent"] == MODEL
        for fields in ({"lora": [{"name": "ink"}]}, {"model": f"{MODEL}:ink"}, {"lora": [{"name": "ink", "scale": 2}]}):
            assert (await draw(client, **fields)).status_code == 200
        assert [request.loras for request in service.performed] == [(lora,), (lora,), (replace(lora, scale=2),)]
        assert (await client.delete(f"{LORAS}/{entry['id']}")).status_code == 204
        assert service.loaded == {}
        assert folder.is_dir(), "requests in flight may need it"
        assert error_of(await draw(client, lora=[{"name": "ink"}])) == (400, "lora_not_found", "lora")
        assert error_of(await client.get(f"/v1/models/{MODEL}:ink")) == (404, "model_not_found", "model")
        assert error_of(await client.delete(f"{LORAS}/{entry['id']}")) == (404, "not_found", "lora_id")
        os.utime(folder, (0, time.time() - KEEP_S - 1))
        again = (await add(client)).json()
        assert again["id"] != entry["id"]
        assert folders(tmp_path) == {again["id"]}
        shutil.rmtree(tmp_path / "loras")
        assert (await client.delete(f"{LORAS}/{again['id']}")).status_code == 204, "its files are gone already"
        assert service.loaded == {}


async def test_keys_have_their_own_and_those_that_are_shared(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=("alpha", "beta"))) as client:
        own = (await add(client, "alpha")).json()
        assert (own["shared"], own["is_own"]) == (False, True)
        assert error_of(await draw(client, "beta", lora=[{"name": "ink"}])) == (400, "lora_not_found", "lora")
        assert error_of(await client.get(f"{LORAS}/{own['id']}", headers=by("beta"))) == (404, "not_found", "lora_id")
        assert (await client.delete(f"{LORAS}/{own['id']}", headers=by("beta"))).status_code == 404
        assert error_of(await client.get(LORAS)) == (401, "missing_api_key", None)
        shared = (await add(client, "beta", name="ink", shared=True)).json()
        assert (await names(client, "alpha"), await names(client, "beta")) == (["ink*", "ink"], ["ink*"])
        for key in ("alpha", "beta"):
            assert (await draw(client, key, model=f"{MODEL}:ink")).status_code == 200
        used = [Path(request.loras[0].folder).name for request in service.performed]
        assert used == [own["id"], shared["id"]], "a key's own precedes one of the same name"
        refused = await client.delete(f"{LORAS}/{shared['id']}", headers=by("alpha"))
        assert error_of(refused) == (403, "lora_of_other_key", "lora_id")


def test_what_a_gang_has_memory_for_may_be_sent() -> None:
    """FLUX.1's distilled adapters have 694 and 1388 MB."""
    assert ApiLimits().max_lora_bytes == LoraLimits().memory_bytes


async def test_names_and_places_are_limited(service: FakeService, tmp_path: Path) -> None:
    service.loras = {MODEL: (Lora(name="always"),)}
    async with client_of(build(service, tmp_path, max_lora_bytes=len(FILE))) as client:
        assert error_of(await add(client, name="always")) == (409, "lora_exists", "name")
        assert (await add(client)).status_code == 201
        assert error_of(await add(client)) == (409, "lora_exists", "name")
        assert (await add(client, model="fake-clips")).status_code == 201, "names are those of a model"
        assert error_of(await add(client, name="large", data=FILE + b"!")) == (413, "body_too_large", "file")
        assert error_of(await add(client, name="c", config=b" " * (1 << 18 | 1))) == (413, "body_too_large", "config")
        both = await asyncio.gather(*(add(client, name="twice") for _ in range(2)))
        assert sorted(answer.status_code for answer in both) == [201, 409]
        assert (await add(client, name="third")).status_code == 201
        assert error_of(await add(client, name="fourth")) == (409, "too_many_loras", "model")
        assert len(folders(tmp_path)) == 4


async def test_adapters_that_come_at_once_have_no_more_places(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path)) as client:
        answers = await asyncio.gather(*(add(client, name=f"ink{number}") for number in range(6)))
        assert sorted(answer.status_code for answer in answers) == [201] * 3 + [409] * 3
        assert len((await client.get(LORAS)).json()["data"]) == len(folders(tmp_path)) == 3


@pytest.mark.parametrize(
    ("failure", "status", "code", "param"),
    [
        (ValueError("this model takes no adapters at run time"), 400, "invalid_value", "file"),
        (AdapterError("the adapter 'ink' has values that are not finite", "file"), 400, "invalid_value", "file"),
        (AdapterError("an adapter for part 'unet'", "part"), 400, "invalid_value", "part"),
        (AdapterError("the config is no object", "config"), 400, "invalid_value", "config"),
        (ModelUnavailableError("no gang was there"), 503, "model_not_ready", None),
        (RuntimeError("?"), 500, "internal", None),
    ],
)
async def test_nothing_is_left_of_one_that_no_gang_takes(
    failure: Exception, status: int, code: str, param: str | None, service: FakeService, tmp_path: Path
) -> None:
    service.on_load = failing(failure)
    app = build(service, tmp_path)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        answer = await add(client)
        assert error_of(answer) == (status, code, param)
        assert (await client.get(LORAS)).json()["data"] == []
        assert folders(tmp_path) == set()
        service.on_load = lambda lora: None
        assert (await add(client)).status_code == 201, "its name is free again"


async def test_it_cannot_be_named_before_all_gangs_have_it(service: FakeService, tmp_path: Path) -> None:
    seen: list[Any] = []
    async with client_of(build(service, tmp_path)) as client:
        load = service.load_lora

        async def look_and_load(model: str, lora: Lora) -> None:
            seen.append([one["status"] for one in (await client.get(LORAS)).json()["data"]])
            seen.append(error_of(await draw(client, lora=[{"name": "ink"}])))
            await load(model, lora)

        service.load_lora = look_and_load  # type: ignore[method-assign]
        assert (await add(client)).json()["status"] == "ready"
        assert seen == [["loading"], (400, "lora_not_found", "lora")]


async def test_paths_below_the_allowed_folders(service: FakeService, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed / "peft", allowed / "sub", other):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(FILE)
    (allowed / "peft" / PEFT_CONFIG).write_text("{}")
    (allowed / "link").symlink_to(other)
    (allowed / "sub" / "out.safetensors").symlink_to(other / "adapter_model.safetensors")
    (allowed / "empty").mkdir()
    (allowed / "circle").symlink_to(allowed / "circle")

    async def add_path(client: httpx.AsyncClient, path: str, name: str = "ink") -> httpx.Response:
        return await client.post(LORAS, json={"model": MODEL, "name": name, "path": path})

    async with client_of(build(service, tmp_path / "data", lora_folders=(allowed,))) as client:
        outside = ["../other", str(other), "link", "sub/out.safetensors", "nowhere", "empty", "a\0b", "owner/name", "/"]
        outside += ["circle", "long" * 999]
        for path in outside:
            assert error_of(await add_path(client, path)) == (400, "invalid_value", "path"), path
        assert service.loaded == {}
        assert (await add_path(client, "peft")).status_code == 201
        assert (await add_path(client, str(allowed / "sub" / "adapter_model.safetensors"), "two")).status_code == 201
        one, two = (Path(lora.folder) for lora in service.loaded.values())
        assert {path.name for path in one.iterdir()} == {LORA_FILE, PEFT_CONFIG}
        assert {path.name for path in two.iterdir()} == {LORA_FILE}
        assert (two / LORA_FILE).read_bytes() == FILE
        assert error_of(await client.post(LORAS, json={"model": MODEL, "name": "x"}))[1:] == ("missing_field", "path")
        service.on_load = failing(AdapterError("its part", "part"))
        assert error_of(await add_path(client, "peft", "three")) == (400, "invalid_value", "part")
        service.on_load = failing(AdapterError("its config", "config"))
        assert error_of(await add_path(client, "peft", "three")) == (400, "invalid_value", "path")
    async with client_of(build(service, tmp_path / "small", lora_folders=(allowed,), max_lora_bytes=1)) as client:
        assert error_of(await add_path(client, "peft")) == (413, "body_too_large", "path")
    async with client_of(build(service, tmp_path / "none")) as client:
        assert "allows no folder" in (await add_path(client, "peft")).json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"name": "no name"}, 400, "invalid_value", "name"),
        ({"name": "i" * 129}, 400, "invalid_value", "name"),
        ({"scale": "11"}, 400, "invalid_value", "scale"),
        ({"scale": "nan"}, 400, "invalid_value", "scale"),
        ({"part": "../x"}, 400, "invalid_value", "part"),
        ({"path": "x"}, 400, "invalid_value", "path"),
        ({"colour": "red"}, 400, "unknown_field", "colour"),
        ({"config": "{}"}, 400, "invalid_value", "config"),
    ],
)
async def test_wrong_fields_are_named(
    fields: dict[str, str], status: int, code: str, param: str, service: FakeService, tmp_path: Path
) -> None:
    async with client_of(build(service, tmp_path)) as client:
        form = {"model": MODEL, "name": "ink", **fields}
        answer = await client.post(LORAS, data=form, files={"file": ("ink.safetensors", FILE)})
        assert error_of(answer) == (status, code, param)
        assert folders(tmp_path) == set()


async def test_forms_without_a_file_and_models_that_take_none(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path)) as client:
        no_file = await client.post(LORAS, data={"model": MODEL}, files={"name": (None, "ink")})
        assert error_of(no_file) == (400, "missing_field", "file")
        text = await client.post(LORAS, data={"model": MODEL, "name": "ink"}, files={"file": (None, "text")})
        assert error_of(text) == (400, "invalid_value", "file")
        assert error_of(await client.post(LORAS, content=b"x", headers={"content-type": "text/plain"}))[0] == 415
        assert error_of(await client.post(LORAS, json={"model": MODEL, "path": " " * (1 << 20)}))[0] == 413
        service.runtime_loras = None
        refused = await add(client)
        assert error_of(refused) == (400, "invalid_value", "model")
        assert "runtime_loras" in refused.json()["error"]["message"]
        assert (await client.get(f"/v1/models/{MODEL}")).json()["takes_loras"] is False


async def test_each_kind_of_database_keeps_them(service: FakeService, tmp_path: Path, database_url: str) -> None:
    """Two replicas of the API share it: each knows the other's adapters at once."""
    settings: dict[str, Any] = {"clips": {"database_url": database_url}, "api_keys": ("alpha", "beta")}
    async with (
        client_of(build(service, tmp_path, **settings)) as one,
        client_of(build(service, tmp_path, **settings)) as other,
    ):
        own, shared = (await add(one, "alpha")).json(), (await add(other, "beta", name="oil", shared=True)).json()
        for client in (one, other):
            assert (await names(client, "alpha"), await names(client, "beta")) == (["ink*", "oil"], ["oil*"])
            assert (await draw(client, "alpha", lora=[{"name": "ink"}, {"name": "oil"}])).status_code == 200
            assert error_of(await add(client, "alpha")) == (409, "lora_exists", "name")
        assert (await other.delete(f"{LORAS}/{own['id']}", headers=by("alpha"))).status_code == 204
        assert error_of(await draw(one, "alpha", lora=[{"name": "ink"}])) == (400, "lora_not_found", "lora")
        assert (await one.delete(f"{LORAS}/{shared['id']}", headers=by("beta"))).status_code == 204
        assert await names(one, "beta") == []


@pytest.mark.parametrize("step", ["add", "set_ready"])
async def test_one_whose_record_is_written_without_an_answer_leaves_nothing(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    written = getattr(LoraStore, step)

    async def write_silently(*arguments: Any) -> None:
        await written(*arguments)
        monkeypatch.setattr(LoraStore, step, written)
        raise StorageLostError("the database does not answer")

    async with client_of(build(service, tmp_path)) as client:
        monkeypatch.setattr(LoraStore, step, write_silently)
        assert (await add(client)).status_code == 503
        assert (await client.get(LORAS)).json()["data"] == []
        assert (service.loaded, folders(tmp_path)) == ({}, set())
        assert (await add(client)).status_code == 201
