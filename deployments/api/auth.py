"""API keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from deployments.api.errors import ApiError


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
