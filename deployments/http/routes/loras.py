"""POST, GET and DELETE /v1/loras: adapters that clients add while models run."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from deployments.asyncio_tools import to_the_end
from deployments.clips.storage import UNAVAILABLE
from deployments.http.body import FORM, JSON, check_content_type, content_type, parse_json
from deployments.http.context import ApiContext
from deployments.http.errors import ApiError
from deployments.http.forms import parse_form
from deployments.http.openapi_text import error_documents
from deployments.http.uploads import counting
from deployments.lora_store import LoraRecord, LoraStatus, new_lora_id
from deployments.requests.model_choice import find_card
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.rules import Requester
from deployments.requests.validation import validated, validated_form
from deployments.service.interface import ModelCard
from pipelines.loading import resolve_file
from pipelines.lora.source import ADAPTER_FILES, MAX_SCALE, NAME, PEFT_CONFIG, LoraLimits
from pipelines.request import Lora

LORAS = "/v1/loras"
LORA_ID = re.compile(r"lora_[0-9a-f]{32}")
FORM_BYTES = 1 << 20
"""Room for everything in a form but the adapter."""
MAX_CONFIG_BYTES = 1 << 18
NAME_SENTENCE = "it must be made of letters, digits, points, dashes and underscores, the first a letter or a digit"
PART = r"^[A-Za-z0-9_]*$"
Files = Mapping[str, BinaryIO]


def _name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise PydanticCustomError("lora_name", NAME_SENTENCE)
    return name


class LoraBody(BaseModel):
    """Fields of POST /v1/loras beside the files."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="Model that the adapter is for.")
    name: Annotated[str, StringConstraints(max_length=128), AfterValidator(_name)] = Field(
        description="Name for requests, in lora or behind the model's name."
    )
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False, description="Default scale.")
    part: Annotated[str, StringConstraints(max_length=128, pattern=PART)] = Field(
        "", description="Transformer that the adapter is for. Layers of other parts are ignored."
    )
    shared: bool = Field(False, description="true: all keys may use it; false: only the key that adds it.")
    path: str | None = Field(
        None, description="In JSON, instead of the form's file: a file or folder in api.lora_folders, which is copied."
    )


class LoraObject(BaseModel):
    """An adapter that a client added."""

    id: str
    object: Literal["lora"] = "lora"
    model: str
    name: str
    scale: float = Field(description="Default scale.")
    part: str = Field(description="Transformer that it is for; empty: the first.")
    bytes: int
    status: LoraStatus = Field(description="loading, until all gangs of the model have it, then ready.")
    shared: bool = Field(description="Whether all keys may use it.")
    is_own: bool = Field(description="Whether this key may delete it.")
    created_at: int

    @classmethod
    def of(cls, record: LoraRecord, context: ApiContext, requester: Requester) -> LoraObject:
        return cls(
            **asdict(record),
            bytes=record.num_bytes,
            shared=not record.scope,
            is_own=may_delete(record, context, requester),
            created_at=int(record.created_at_s),
        )


class LoraList(BaseModel):
    object: Literal["list"] = "list"
    data: list[LoraObject]


def lora_routes(context: ApiContext) -> APIRouter:
    authorized = Depends(context.authorize)
    router = APIRouter(tags=["loras"])

    @router.post(
        LORAS,
        status_code=201,
        responses=error_documents(400, 401, 403, 404, 408, 409, 413, 415, 503, 507),
        openapi_extra=ORDER,
    )
    async def add_lora(request: Request, requester: Requester = authorized) -> LoraObject:
        """Add an adapter to a model. The answer is sent once all gangs of the model have loaded it."""
        with context.admission.memory.taken() as take, ExitStack() as opened:
            receive = counting(request.receive, take, context.settings.max_body_bytes)
            body, files = await read_lora_form(Request(request.scope, receive), context, opened)
            record = await NewLora(context=context, requester=requester, body=body, files=files).run()
        return LoraObject.of(record, context, requester)

    @router.get(LORAS, responses=error_documents(401, 503))
    async def list_loras(requester: Requester = authorized) -> LoraList:
        """List the added adapters that the key may use, the oldest first."""
        records = await context.loras.visible(context.viewer(requester))
        records.sort(key=lambda record: record.created_at_s)
        return LoraList(data=[LoraObject.of(record, context, requester) for record in records])

    @router.get("/v1/loras/{lora_id}", responses=error_documents(401, 404, 503))
    async def read_lora(lora_id: str, requester: Requester = authorized) -> LoraObject:
        """Return one added adapter."""
        return LoraObject.of(await find_lora(context, requester, lora_id), context, requester)

    @router.delete("/v1/loras/{lora_id}", status_code=204, responses=error_documents(401, 403, 404, 503))
    async def delete_lora(lora_id: str, requester: Requester = authorized) -> Response:
        """Delete an adapter. Requests that were accepted before still use it."""
        record = await find_lora(context, requester, lora_id)
        if not may_delete(record, context, requester):
            added = f"The adapter {shown(lora_id)} was added with another key, or without one"
            message = f"{added}: only that key may delete it, or any with api.share_between_keys"
            raise ApiError(403, message, param="lora_id", code="lora_of_other_key")
        await context.loras.remove(record.id)
        await asyncio.to_thread(context.loras.touch, record.id)
        await context.service.remove_lora(record.model, context.loras.lora(record))
        await context.loras.sweep()
        return Response(status_code=204)

    return router


LORA_SCHEMA = LoraBody.model_json_schema()
FILE_SCHEMA = {"type": "string", "format": "binary"}
FORM_SCHEMA: dict[str, Any] = {
    **LORA_SCHEMA,
    "properties": {
        **{name: schema for name, schema in LORA_SCHEMA["properties"].items() if name != "path"},
        "file": {**FILE_SCHEMA, "description": "The adapter, as safetensors."},
        "config": {**FILE_SCHEMA, "description": "PEFT's adapter_config.json, if there is one."},
    },
    "required": [*LORA_SCHEMA["required"], "file"],
}
ORDER: dict[str, Any] = {
    "requestBody": {"required": True, "content": {FORM: {"schema": FORM_SCHEMA}, JSON: {"schema": LORA_SCHEMA}}}
}


def may_delete(record: LoraRecord, context: ApiContext, requester: Requester) -> bool:
    """Return whether the requester has added an adapter, or keys make no difference here."""
    return context.viewer(requester) is None or record.key_hash == requester.key


async def find_lora(context: ApiContext, requester: Requester, lora_id: str) -> LoraRecord:
    """Return an adapter. ApiError 404 if there is none that the requester may use."""
    is_id = LORA_ID.fullmatch(lora_id)
    found = await context.loras.visible(context.viewer(requester), lora_id=lora_id) if is_id else []
    if not found:
        raise ApiError(404, f"There is no adapter {shown(lora_id)}", param="lora_id")
    return found[0]


async def read_lora_form(request: Request, context: ApiContext, opened: ExitStack) -> tuple[LoraBody, Files]:
    """Return the fields and the files, which ``opened`` closes: those of the form, or those at the path in JSON."""
    check_content_type(request, FORM, JSON)
    if content_type(request) == JSON:
        raw = await request.body()
        if len(raw) > FORM_BYTES:
            raise ApiError(413, f"The body is larger than {FORM_BYTES} bytes")
        body = validated(LoraBody, parse_json(raw))
        if body.path is None:
            raise RequestError("path is required in JSON; send the file itself in a form", "path", code="missing_field")
        return body, await asyncio.to_thread(open_files, body.path, context.settings.lora_folders, opened)
    fields = dict((await parse_form(request)).multi_items())
    files = {name: fields.pop(name) for name in ("file", "config") if isinstance(fields.get(name), UploadFile)}
    for name, value in fields.items():
        if isinstance(value, UploadFile) or name in ("file", "config"):
            needed = "a file" if name in ("file", "config") else "a plain form field"
            raise RequestError(f"{name} must be {needed}", name)
    body = validated_form(LoraBody, {name: str(value) for name, value in fields.items()})
    if body.path is not None:
        raise RequestError("path has no effect in a form: send it in JSON, or a file here", "path")
    if "file" not in files:
        raise RequestError("file is required: the adapter, as safetensors", "file", code="missing_field")
    return body, {name: upload.file for name, upload in files.items() if isinstance(upload, UploadFile)}


def open_files(path: str, folders: tuple[Path, ...], opened: ExitStack) -> Files:
    """Return the adapter at ``path``, absolute or below one of ``folders``, and PEFT's config beside it.

    RequestError, which does not say what there is elsewhere, for a path outside the folders.
    """
    if "\0" in path:
        raise RequestError("path has a character that no path has", "path")
    try:
        places = [(folder.resolve(), (folder / path).resolve()) for folder in folders]
        allowed = [place for folder, place in places if place.is_relative_to(folder) and place.exists()]
    except (OSError, RuntimeError):  # a path that is too long or not readable, or a circle of links
        raise RequestError(f"The path {shown(path)} cannot be read", "path") from None
    if not allowed:
        known = f"it must be below {', '.join(map(str, folders))}" if folders else "the server allows no folder"
        raise RequestError(f"There is no adapter at the path {shown(path)}: {known} (api.lora_folders)", "path")
    try:
        file = resolve_file(str(allowed[0]), "", ADAPTER_FILES)
    except ValueError as error:
        raise RequestError(str(error), "path") from None
    if not any(file.resolve().is_relative_to(folder) for folder, _ in places):
        raise RequestError(f"The adapter at the path {shown(path)} is a link that leaves the allowed folders", "path")
    files: dict[str, BinaryIO] = {"file": opened.enter_context(file.open("rb"))}
    if (config := file.parent / PEFT_CONFIG).is_file() and any(
        config.resolve().is_relative_to(folder) for folder, _ in places
    ):
        files["config"] = opened.enter_context(config.open("rb"))
    return files


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLora:
    """An adapter on its way to the gangs. Until the last of them has it, requests cannot name it."""

    context: ApiContext
    """Services and settings that all routes share."""
    requester: Requester
    """The sender."""
    body: LoraBody
    """Fields of the form."""
    files: Files
    """Open uploads by field: the adapter, and PEFT's configuration."""
    lora_id: str = field(default_factory=new_lora_id)
    """``lora_`` and 128 random bits."""

    async def run(self) -> LoraRecord:
        """Return the adapter's record once all gangs of its model have it. ApiError or RequestError if it cannot be."""
        store, body, card = self.context.loras, self.body, self._card()
        limits = lora_limits(card)
        await self._check_name()
        num_bytes = self._check_sizes()
        viewer = self.context.viewer(self.requester)
        record = LoraRecord(
            id=self.lora_id,
            model=card.name,
            name=body.name,
            scope="" if body.shared or viewer is None else viewer,
            key_hash=self.requester.key,
            scale=body.scale,
            part=body.part,
            num_bytes=num_bytes,
            created_at_s=time.time(),
        )
        await store.sweep()
        async with self._undone(record):
            refused = await store.add(record, limits.max_loras)
        if refused == "full":
            message = f"{card.name} has {limits.max_loras} adapters already, its runtime_loras.max_loras; delete one"
            raise ApiError(409, message, param="model", code="too_many_loras")
        if refused == "exists":
            raise duplicate_name(body.name, card.name)
        return await self._loaded(record)

    async def _loaded(self, record: LoraRecord) -> LoraRecord:
        """Write the files, and load them on all gangs. Whatever fails, nothing of the adapter is left."""
        store, lora = self.context.loras, self.context.loras.lora(record)
        async with self._undone(record):
            await asyncio.to_thread(store.write, record.id, self.files["file"], self.files.get("config"))
            await self._load(record.model, lora)
            if not await store.set_ready(record.id):
                raise duplicate_name(record.name, record.model)  # deleted meanwhile
        (ready,) = await store.visible(None, lora_id=record.id)
        return ready

    async def _load(self, model: str, lora: Lora) -> None:
        try:
            await self.context.service.load_lora(model, lora)
        except ValueError as error:
            raise RequestError(str(error), self._param(getattr(error, "field", "file"))) from None

    def _param(self, field: str) -> str:
        """Return the parameter to blame: in JSON, ``path`` for both files."""
        return "path" if self.body.path is not None and field in ("file", "config") else field

    @asynccontextmanager
    async def _undone(self, record: LoraRecord) -> AsyncIterator[None]:
        """Leave nothing of the adapter if the block fails; what cannot be deleted now, the store sweeps later."""
        try:
            yield
        except BaseException:
            with suppress(*UNAVAILABLE):
                await to_the_end(self._undo(record))
            raise

    async def _undo(self, record: LoraRecord) -> None:
        await self.context.loras.remove(record.id)
        await self.context.service.remove_lora(record.model, self.context.loras.lora(record))
        await asyncio.to_thread(self.context.loras.discard, record.id)

    def _card(self) -> ModelCard:
        return find_card(self.context.service.cards(), self.body.model)

    async def _check_name(self) -> None:
        """Raise ApiError 409 if the requester can name an adapter or a recipe so already."""
        card = find_card(await self.context.cards(self.requester), self.body.model)
        if self.body.name in {*(lora.name for lora in card.loras), *card.recipes}:
            raise duplicate_name(self.body.name, card.name)

    def _check_sizes(self) -> int:
        """Return the size of the adapter in bytes. ApiError 413 if a file is too large."""
        sizes = {name: file.seek(0, 2) for name, file in self.files.items()}
        for name, limit in (("file", self.context.settings.max_lora_bytes), ("config", MAX_CONFIG_BYTES)):
            if sizes.get(name, 0) > limit:
                message = f"The {name} of the adapter has {sizes[name]} bytes; at most {limit} are allowed"
                raise ApiError(413, message, param=self._param(name))
            if name in sizes:
                self.files[name].seek(0)
        return sizes["file"]


def lora_limits(card: ModelCard) -> LoraLimits:
    """Return the limits of a model's adapters. RequestError if clients may add none."""
    if card.runtime_loras is None:
        message = f"{card.name} is served with the adapters of its configuration alone, which has no runtime_loras"
        raise RequestError(message, "model")
    return card.runtime_loras


def duplicate_name(name: str, model: str) -> ApiError:
    message = f"{model} has an adapter or a recipe {shown(name)} already; take another name, or delete that one first"
    return ApiError(409, message, param="name", code="lora_exists")
