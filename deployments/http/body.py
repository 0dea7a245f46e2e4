"""Bodies of JSON and forms as checked types.

FastAPI's own body parameters accept UTF-16 and lone surrogates, and have no 415. They read the body before the API
key is checked. One route cannot take JSON as well as a form, and files of a form go to the disk.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from starlette.requests import Request

from deployments.http.errors import ApiError
from deployments.http.forms import read_form
from deployments.requests.bodies import MediaBody
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.untrusted import json_value
from deployments.requests.validation import unfolded, unfolded_form, validated, validated_form

B = TypeVar("B", bound=MediaBody)

JSON = "application/json"
FORM = "multipart/form-data"
FORMS = (FORM, "application/x-www-form-urlencoded")
"""The second is what aiohttp sends of a form without files, and with it the benchmark clients of other servers."""
LARGE_BYTES = 1 << 18
"""JSON from this size on has pictures in it, and takes long enough to be read beside the event loop."""


async def read_json(request: Request, body_type: type[B]) -> B:
    """Return the JSON body as ``body_type``. RequestError names a wrong field, ApiError 415 a wrong content type."""
    check_content_type(request, JSON)
    raw = await request.body()
    is_small = len(raw) < LARGE_BYTES
    return _from_json(raw, body_type) if is_small else await asyncio.to_thread(_from_json, raw, body_type)


async def read_json_or_form(request: Request, body_type: type[B]) -> B:
    """Return the body like ``read_json``, or from a form, where numbers are text and "" is absent.

    Its pictures are files there.
    """
    check_content_type(request, JSON, *FORMS)
    if content_type(request) == JSON:
        return await read_json(request, body_type)
    form = await read_form(request, body_type)
    return validated_form(body_type, unfolded_form(form.fields), form.pictures)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def check_content_type(request: Request, *allowed: str) -> None:
    """Raise ApiError 415 for a compressed body, or a content type that is not in ``allowed``.

    A body without a type is refused. Any page may send one to any server, as it may send forms: browsers do not ask
    the server first (Fetch Standard, section 3.3).
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding is {shown(encoding)}; send the body as it is, without compression"
        raise ApiError(415, message, code="unsupported_content_encoding")
    if content_type(request) not in allowed:
        sent = request.headers.get("content-type")
        message = f"Content-Type is {shown(sent) if sent else 'missing'}; allowed: {', '.join(allowed)}"
        raise ApiError(415, message, code="unsupported_content_type")


def parse_json(raw: bytes) -> Any:
    """Return the JSON value of ``raw``, like ``json_value``. RequestError if it is none."""
    try:
        return json_value(raw)
    except RequestError:
        raise
    except ValueError as error:
        message = f"The body is not valid JSON: {error}. Send UTF-8, without NaN, Infinity or half a surrogate pair"
        raise RequestError(message, code="bad_json") from None


def _from_json(raw: bytes, body_type: type[B]) -> B:
    return validated(body_type, unfolded(parse_json(raw)))
