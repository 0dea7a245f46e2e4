"""What every route works with, and who may use it: by API keys."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from deployments.api.errors import ApiError, retry_after
from deployments.api.files import FileShelf
from deployments.api.guards.admission import Admission
from deployments.api.idempotency import KnownRequests
from deployments.api.lookout import Lookout
from deployments.api.settings import ApiSettings
from deployments.clips.clips import Clips
from deployments.requests.bodies import MediaBody
from deployments.requests.model_choice import Needs, choose_card
from deployments.requests.pictures.unpack import unpack
from deployments.requests.rules import Requester, RequestRules, ResolvedRequest
from deployments.studio.interface import Studio
from deployments.usage.accounts import Accounts, KeyLimitGuard
from deployments.usage.api_keys import KeyRing
from pipelines.request import MediaKind

BEARER = HTTPBearer(auto_error=False, description="Needed only if the server was started with API keys.")
B = TypeVar("B", bound=MediaBody)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    studio: Studio
    settings: ApiSettings
    files: FileShelf
    clips: Clips
    admission: Admission
    lookout: Lookout
    unpacking: Executor
    accounts: Accounts
    key_limits: KeyLimitGuard
    known: KnownRequests

    async def authorize(self, request: Request, credentials: Credentials) -> None:
        """Raises ApiError 401 without a known key: a dependency of every route behind one."""
        if self.settings.keys and credentials is None:
            raise _refusal("An API key is needed: send it as Authorization: Bearer KEY", "missing_api_key")
        await self.recognize(request, credentials)
        if self.settings.keys and not request.state.key_hash:
            raise _refusal("This API key is not known here", "invalid_api_key")

    async def recognize(self, request: Request, credentials: Credentials) -> None:
        """Notes whose the key is: a dependency of routes that do without one. An unknown key is as good as none: it may
        be meant for a gateway in front of this server."""
        key = None if credentials is None else credentials.credentials
        request.state.key_hash = "" if key is None else find_key(self.settings.keys, key) or ""

    def requester(self, request: Request) -> Requester:
        """Returns who sent a request, which was authorized or recognized."""
        key = request.state.key_hash
        return Requester(
            request_id=request.state.request_id,
            key=key,
            weight=self.accounts.limits_of(key).weight,
            came_s=request.state.came_s,
        )

    def viewer(self, request: Request) -> str | None:
        """Returns whose clips and files the client may see, by the hash of its key; None if everybody's."""
        is_open = not self.settings.keys or self.settings.share_between_keys
        return None if is_open else str(request.state.key_hash)

    async def resolved(self, body: B, kind: MediaKind) -> ResolvedRequest[B]:
        """Return ``body`` with its model and its decoded pictures. RequestError if the model takes others.

        ApiError 429 or 503 if the model has no place for a picture: decoding is not begun.
        """
        card = choose_card(self.studio.cards(), body.model, kind, Needs.of(body))
        sources = RequestRules(card).check_sources(body)
        if not sources.all:
            return ResolvedRequest(card=card, body=body)
        gang_in_s = await self.check_ready(card.name)
        if kind == "image":
            self.admission.check_place(card.name, gang_in_s)
        loop = asyncio.get_running_loop()
        pictures = await loop.run_in_executor(self.unpacking, unpack, sources, self.settings)
        return ResolvedRequest(card=card, body=body, pictures=pictures)

    async def check_ready(self, model: str) -> float:
        """Returns in how many seconds ``model`` begins work that comes now, 0 while it is ready: a request waits while
        a gang is rebuilt. ApiError 503 where there is nothing to wait for."""
        reason = (await self.studio.not_ready()).get(model)
        if reason is None:
            return 0.0
        wait_s = self.studio.retry_after_s(model)
        if self.studio.may_wait_for(model):
            return wait_s
        raise ApiError(503, f"{model} is not ready: {reason}", code="model_not_ready", headers=retry_after(wait_s))


def find_key(keys: KeyRing, key: str) -> str | None:
    """Returns the hash of ``key``; None unless it is one of ``keys``."""
    # Headers arrive as Latin-1, whatever was sent; keys are UTF-8.
    return keys.find(key.encode("latin-1").decode(errors="replace"))


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
