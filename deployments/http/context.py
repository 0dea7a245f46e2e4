"""The context of all routes, and authorization by API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from deployments.batches.contents import Contents
from deployments.batches.records import BatchStore
from deployments.clips.clips import Clips
from deployments.http.admission import Admission
from deployments.http.clip_events import ClipPoller
from deployments.http.errors import ApiError, retry_after
from deployments.http.files import FileShelf, ObjectShelf
from deployments.http.idempotency import KnownRequests
from deployments.http.middleware import REQUESTER
from deployments.http.settings import ApiSettings
from deployments.http.streams import until_disconnect
from deployments.lora_store import LoraStore
from deployments.requests.bodies import MediaBody
from deployments.requests.model_choice import Needs, choose_card, names_others
from deployments.requests.pictures.sources import Source, Sources
from deployments.requests.pictures.unpack import unpack
from deployments.requests.pictures.video import FormBeside
from deployments.requests.prompt_enhancer import PromptEnhancers
from deployments.requests.recipe_choice import with_recipe
from deployments.requests.rules import Requester, RequestRules, ResolvedRequest
from deployments.service.interface import ModelCard, Service
from deployments.usage.accounts import Accounts, KeyLimitGuard
from pipelines.request import NO_PICTURES, InputPictures, MediaKind, MediaRequest

BATCH_KEY = "troupe.batch_key"
"""Key in the ASGI scope of a batch's requests; the value is the hash of the batch's API key."""
BEARER = HTTPBearer(auto_error=False, description="Needed only if the server was started with API keys.")
B = TypeVar("B", bound=MediaBody)
ReadSource = Callable[[Source, str], Awaitable[Source]]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    """Services and settings that all routes share."""

    service: Service
    """Makes pictures and clips."""
    settings: ApiSettings
    """Limits and places."""
    files: FileShelf | ObjectShelf
    """Pictures that answers name by URL."""
    clips: Clips
    """Durable requests for clips."""
    admission: Admission
    """Limits of open requests and pictures."""
    poller: ClipPoller
    """Watches records of clips for streams."""
    unpacking: Executor
    """Threads that decode pictures and clips."""
    accounts: Accounts
    """Use of each API key."""
    key_limits: KeyLimitGuard
    """Limits of API keys, over all replicas."""
    known: KnownRequests
    """Answers by ``Idempotency-Key``."""
    enhancers: PromptEnhancers
    """Rewriters of prompts by model."""
    batches: BatchStore
    """Records of batches and files."""
    contents: Contents
    """Contents of these files."""
    loras: LoraStore
    """Adapters that clients add."""

    async def authorize(self, request: Request, credentials: Credentials) -> Requester:
        """Return the sender: a dependency of every route that needs a key. ApiError 401 without a known key."""
        if self.settings.keys and credentials is None and BATCH_KEY not in request.scope:
            raise _refusal("An API key is needed: send it as Authorization: Bearer KEY", "missing_api_key")
        requester = await self.recognize(request, credentials)
        if self.settings.keys and not requester.key:
            raise _refusal("This API key is not known here", "invalid_api_key")
        return requester

    async def recognize(self, request: Request, credentials: Credentials) -> Requester:
        """Return the sender: a dependency of routes that need no key.

        An unknown key counts as none: it may be meant for a gateway in front of this server.
        """
        key = ""
        if credentials is not None:  # headers arrive as Latin-1, whatever was sent; keys are UTF-8
            sent = credentials.credentials.encode("latin-1").decode(errors="replace")
            key = self.settings.keys.find(sent) or ""
        if (of_batch := request.scope.get(BATCH_KEY)) is not None:  # a key may be taken away while its batch is made
            key = of_batch if self.settings.keys.holds(of_batch) or not self.settings.keys else ""
        requester: Requester = request.scope[REQUESTER]
        return replace(requester, key=key, weight=self.accounts.limits_of(key).weight)

    def viewer(self, requester: Requester) -> str | None:
        """Return the hash of the key whose clips and files the requester may see; None if it may see all."""
        is_open = not self.settings.keys or self.settings.share_between_keys
        return None if is_open else requester.key

    async def cards(self, requester: Requester) -> Mapping[str, ModelCard]:
        """Return the cards of all models, with the adapters that clients have added for the requester."""
        return await self.loras.on_cards(self.service.cards(), self.viewer(requester))

    async def resolved(
        self, body: B, kind: MediaKind, requester: Requester, read: ReadSource | None = None
    ) -> ResolvedRequest[B]:
        """Return ``body`` with its model and its decoded inputs. RequestError if the model takes others.

        ``read`` returns the content of a clip or file that is named by its id, given that and the field.
        """
        card = choose_card(self.service.cards(), body.model, kind, Needs.of(body))
        if card.runtime_loras is not None and names_others(body, card):
            card = choose_card(await self.cards(requester), body.model, kind, Needs.of(body))
        body = with_recipe(body, card)
        rules = RequestRules(card)
        sources, pictures = rules.check_sources(body), NO_PICTURES
        if sources.all or sources.video is not None:
            gang_in_s = await self.check_ready(card.name)
            if kind == "image":
                self.admission.check_place(card.name, gang_in_s)
            if read is not None and sources.video is not None:
                first, *further = [await read(one, "video") for one in sources.videos]
                mask = None if sources.video_mask is None else await read(sources.video_mask, "mask")
                sources = replace(sources, video=first, further_videos=tuple(further), video_mask=mask)
            pictures = await self._decoded(sources, partial(rules.video_form, body))
            pictures = pictures if body.ground is None else await asyncio.to_thread(pictures.over, body.ground)
        return ResolvedRequest(card=card, body=body, pictures=pictures)

    async def _decoded(self, sources: Sources, form_of: FormBeside) -> InputPictures:
        """Return the pixels of ``sources``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.unpacking, unpack, sources, self.settings, form_of)

    async def enhanced(self, request: Request, asked: MediaRequest, num: int = 1) -> MediaRequest:
        """Return what ``request`` asked for, its prompt rewritten if that is wanted. ClientGoneError ends the wait.

        Meanwhile, ``num`` pictures of the key count as under way: see ``KeyLimitGuard.taken`` for the errors.
        """
        if not asked.enhance_prompt:
            return asked
        async with self.key_limits.taken(asked.key, num):  # else a key takes the connections of all others
            return await until_disconnect(request.receive, self.enhancers.enhanced(asked))

    async def check_ready(self, model: str) -> float:
        """Return in how many seconds ``model`` begins new work, 0 while it is ready.

        Requests wait while a gang is rebuilt. ApiError 503 without anything to wait for.
        """
        reason = (await self.service.not_ready()).get(model)
        if reason is None:
            return 0.0
        wait_s = self.service.retry_after_s(model)
        if self.service.may_wait_for(model):
            return wait_s
        raise ApiError(503, f"{model} is not ready: {reason}", code="model_not_ready", headers=retry_after(wait_s))


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
