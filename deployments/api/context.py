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
from deployments.api.guards.admission import Admission
from deployments.api.lookout import Lookout
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
    admission: Admission
    lookout: Lookout

    async def authorize(self, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        """Raises ApiError 401 without a known key: a dependency of every route behind one."""
        check_key(self.settings.api_keys, credentials.credentials if credentials else None)

    async def check_ready(self, model: str) -> None:
        """Raises ApiError 503 while ``model`` cannot take requests."""
        reason = (await self.studio.not_ready()).get(model)
        if reason is not None:
            message = f"{model} is not ready: {reason}"
            raise ApiError(503, message, code="model_not_ready", headers={"Retry-After": "2"})


def check_key(keys: Sequence[str], key: str | None) -> None:
    """Raises ApiError 401 unless ``key`` is one of ``keys``; without keys, everything passes."""
    if not keys:
        return
    if key is None:
        raise _refusal("An API key is needed: send it as Authorization: Bearer KEY", "missing_api_key")
    # Headers arrive as Latin-1; compared are the bytes that were sent. Every key is looked at, so time tells nothing.
    key_bytes = key.encode("latin-1")
    if not sum(hmac.compare_digest(key_bytes, one.encode()) for one in keys):
        raise _refusal("This API key is not known here", "invalid_api_key")


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
