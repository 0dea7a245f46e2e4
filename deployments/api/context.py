"""What every route works with, and who may use it: API keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from deployments.api.errors import ApiError
from deployments.api.files import FileShelf
from deployments.api.settings import ApiSettings
from deployments.clips.clips import Clips
from deployments.studio.interface import Studio

BEARER = HTTPBearer(auto_error=False, description="Needed only if the server was started with API keys.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    studio: Studio
    settings: ApiSettings
    files: FileShelf
    clips: Clips

    async def authorize(self, sent: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        """A dependency of every route behind the key. ApiError 401."""
        check_key(self.settings.api_keys, sent.credentials if sent else None)

    async def check_ready(self, model: str) -> None:
        """ApiError 503 while ``model`` cannot take requests."""
        reason = (await self.studio.not_ready()).get(model)
        if reason is not None:
            message = f"{model} is not ready: {reason}"
            raise ApiError(503, message, code="model_not_ready", headers={"Retry-After": "2"})


def check_key(keys: Sequence[str], sent: str | None) -> None:
    """ApiError 401 unless ``sent`` is one of ``keys``; without keys, everything passes."""
    if not keys:
        return
    if sent is None:
        raise _refusal("An API key is needed: send it as Authorization: Bearer KEY", "missing_api_key")
    # Headers arrive as Latin-1; compared are the bytes that were sent. Every key is looked at, so time tells nothing.
    sent_bytes = sent.encode("latin-1")
    if not sum(hmac.compare_digest(sent_bytes, key.encode()) for key in keys):
        raise _refusal("This API key is not known here", "invalid_api_key")


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
