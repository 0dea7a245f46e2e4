"""From a request's bytes to a body of checked types. Nothing gets past here that is not valid and in range."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from deployments.api.errors import ApiError
from deployments.requests.errors import RequestError, field_error, shown, validated

B = TypeVar("B", bound=BaseModel)


async def read_json(request: Request, body_type: type[B]) -> B:
    """The JSON body as ``body_type``. ApiError 400 that names the field, 415 for another content type."""
    check_content_type(request, "application/json")
    return validated(body_type, parse_json(await request.body()))


async def read_json_or_form(request: Request, body_type: type[B]) -> B:
    """As ``read_json``, or the same fields as multipart/form-data, where numbers are text."""
    if content_type(request) != "multipart/form-data":
        check_content_type(request, "application/json", "multipart/form-data")
        return validated(body_type, parse_json(await request.body()))
    fields = await read_form(request, set(body_type.model_fields))
    try:
        return body_type.model_validate_strings(fields)
    except ValidationError as error:
        raise field_error(error.errors(), body_type.model_fields) from None


async def read_form(request: Request, known: set[str]) -> dict[str, str]:
    """The text fields of a form. ApiError 400 for a file, or a field given twice."""
    fields: dict[str, str] = {}
    async with request.form(max_files=16, max_fields=100) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name in known:
                raise RequestError(f"{name} is a file; it must be a plain form field", name)
            if name in fields:
                raise RequestError(f"{shown(name)} is given twice", name)
            fields[name] = "" if isinstance(value, UploadFile) else value
    return fields


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "application/json").split(";")[0].strip().lower()


def check_content_type(request: Request, *allowed: str) -> None:
    if content_type(request) not in allowed:
        given = shown(request.headers["content-type"])
        raise ApiError(415, f"Content-Type is {given}; allowed: {', '.join(allowed)}", code="unsupported_content_type")


def parse_json(raw: bytes) -> Any:
    """The value in ``raw``, strict RFC 8259 in UTF-8: no NaN, no repeated names, no lone surrogates."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be UTF-8
    except UnicodeEncodeError:
        raise RequestError("The body holds half of a surrogate pair; send whole characters", code="bad_json") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="bad_json") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return fields
