"""From a request's bytes to a body of checked types. Nothing gets past here that is not valid and in range.

FastAPI's own body parameters do less: they take UTF-16 and lone surrogates, read the body before the API key is looked
at, know no 415, and one route cannot take JSON as well as a form.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.requests import Request

from deployments.api.errors import ApiError
from deployments.requests.errors import RequestError, shown, validated, validated_form

B = TypeVar("B", bound=BaseModel)

JSON = "application/json"
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
"""The second is what aiohttp sends of a form without files, and with it the benchmark clients of other servers."""
A_FILE = "(a file)"
"""In place of a file's content, which no field takes."""


async def read_json(request: Request, body_type: type[B]) -> B:
    """Returns the JSON body as ``body_type``. RequestError names a wrong field, ApiError 415 a wrong content type."""
    check_content_type(request, JSON)
    return validated(body_type, parse_json(await request.body()))


async def read_json_or_form(request: Request, body_type: type[B]) -> B:
    """Returns what ``read_json`` does, or the same fields from a form, where numbers are text and "" is absent."""
    check_content_type(request, JSON, *FORMS)
    if content_type(request) == JSON:
        return validated(body_type, parse_json(await request.body()))
    return validated_form(body_type, await read_form(request, body_type))


async def read_form(request: Request, body_type: type[BaseModel]) -> dict[str, str]:
    """Returns the text fields of a form. RequestError for a file in the place of a known one."""
    fields: dict[str, str] = {}
    async with request.form(max_files=16, max_fields=100) as form:
        for name, value in form.items():
            if isinstance(value, UploadFile) and name in body_type.model_fields:
                raise RequestError(f"{name} is a file; it must be a plain form field", name)
            fields[name] = A_FILE if isinstance(value, UploadFile) else value
    return fields


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def check_content_type(request: Request, *allowed: str) -> None:
    """Raises ApiError 415 for what is compressed, or not said to be one of ``allowed``.

    A body without a type is none: browsers let any page send that to any server without asking it (Fetch Standard,
    section 3.3), as they do forms.
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
    """Returns the value in ``raw``, by RFC 8259 in UTF-8: no NaN, no lone surrogates. Of a name's values the last."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        message = f"The body is not valid JSON: {error}. Send UTF-8, without NaN, Infinity or half a surrogate pair"
        raise RequestError(message, code="bad_json") from None
