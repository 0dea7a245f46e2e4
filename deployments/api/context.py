"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from deployments.api.auth import check_key
from deployments.api.files import FileShelf
from deployments.api.settings import ApiSettings
from deployments.clips.clips import Jobs
from deployments.studio.interface import Studio

BEARER = HTTPBearer(auto_error=False, description="Needed only if the server was started with API keys.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    studio: Studio
    settings: ApiSettings
    files: FileShelf
    jobs: Jobs

    async def authorize(self, sent: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        """A dependency of every route behind the key. ApiError 401."""
        check_key(self.settings.api_keys, sent.credentials if sent else None)
