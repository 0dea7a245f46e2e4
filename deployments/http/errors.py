"""Errors as OpenAI's clients know them: a status, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from sqlalchemy import exc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import compile_path

from deployments.clips.storage import DATABASE_FAILURES, StorageFullError, StorageLostError, is_full
from deployments.requests.request_errors import RequestError, is_user_error, shown
from deployments.requests.validation import first_error
from deployments.service.interface import ModelUnavailableError
from deployments.usage.keeper import AccountsUnavailableError
from deployments.usage.quotas import LimitReachedError
from engines.core.engine import JobFailedError
from engines.core.field_error import FieldError
from engines.gang.errors import GangBrokenError, QueueFullError, TooLateError

FAILURES: tuple[type[Exception], ...] = (
    RequestError,
    QueueFullError,
    LimitReachedError,
    AccountsUnavailableError,
    GangBrokenError,
    JobFailedError,
    ModelUnavailableError,
    StorageFullError,
    StorageLostError,
    *DATABASE_FAILURES,
    OSError,
)

logger = logging.getLogger("troupe.api")

GPU_HEADER = "X-Troupe-Gpu-Seconds"
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
STATUSES = {"model_not_found": 404, "picture_too_large": 413, "video_too_large": 413}
"""Status by error code of a wrong request; 400 for all others."""
CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class ErrorDetail(BaseModel):
    """One error: a message for people, a code for programs, and the wrong parameter."""

    message: str
    type: str
    param: str | None = Field(description="The field or parameter to blame; null for the whole request.")
    code: str | None = Field(description="For programs; each status lists its own.")


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ErrorEvent(ErrorBody):
    """An error after a stream has begun. It is the last event."""

    type: Literal["error"] = "error"


class ApiError(Exception):
    """An answer other than success. ``message`` says what was given, what is allowed and what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def retry_after(seconds: float) -> dict[str, str]:
    """Return a ``Retry-After`` header in whole seconds, at least one."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def from_failure(failure: Exception) -> ApiError | None:
    """Return the answer to an error of a request; None if the error is a defect."""
    match failure:
        case ApiError():
            return failure
        case RequestError():
            return ApiError(STATUSES.get(failure.code, 400), failure.message, param=failure.param, code=failure.code)
        case LimitReachedError():
            return _later(429, "key_limit", failure)
        case AccountsUnavailableError():
            return _later(503, "accounts_unavailable", failure)
        case TooLateError():
            return _later(429, "too_late", failure)
        case QueueFullError():
            return _later(429, "queue_full", failure)
        case ModelUnavailableError():
            return _later(503, "model_not_ready", failure)
        case StorageLostError() | exc.DBAPIError() | exc.TimeoutError():
            message = (
                str(failure) if isinstance(failure, StorageLostError) else "The records of clips cannot be reached"
            )
            return ApiError(503, message, code="storage_unavailable", headers=retry_after(10.0))
        case StorageFullError() | OSError() if is_full(failure):
            return ApiError(507, f"There is no room on the server's disk: {failure}", code="storage_full")
        case GangBrokenError():
            # The gang was rebuilt and the job run again already: a client that retries by itself breaks more gangs.
            message = f"The ranks that worked on this request failed: {failure}"
            return ApiError(502, message, code="gang_broken", headers={"x-should-retry": "false"})
        case JobFailedError():
            message = f"The model failed at this request: {failure}"
            return ApiError(500, message, code="job_failed", headers={"x-should-retry": "false"})
        case ValueError() if is_user_error(failure):
            return ApiError(400, str(failure), param=failure.field if isinstance(failure, FieldError) else None)
    return None


def _later(status: int, code: str, failure: Any) -> ApiError:
    return ApiError(status, str(failure), code=code, headers=retry_after(failure.retry_after_s))


def answer_to(failure: Exception, request_id: str) -> ApiError:
    """Return the answer to any failure. Log a failure of the server."""
    answer = from_failure(failure)
    if answer is None:
        return internal_error(failure, request_id)
    if answer.status >= 500 and answer is not failure:
        logger.error("a request failed: %r", failure)
    return answer


def internal_error(failure: Exception, request_id: str) -> ApiError:
    """Log a defect with its traceback. Return its answer, which names the request for the log."""
    logger.error("unhandled error", exc_info=failure)
    return ApiError(500, f"Internal error; the log has more under request id {request_id}", code="internal")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    for kind in FAILURES:
        app.add_exception_handler(kind, _on_failure)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_failure(request: Request, failure: Exception) -> JSONResponse:
    error = from_failure(failure)
    if error is None:
        raise failure
    if error.status >= 500:
        logger.error("%s %s: %r", request.method, request.url.path, failure)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is nothing at {shown(request.url.path)}{_without_slashes(request)}",
        405: f"{request.method} is not allowed at {shown(request.url.path)}",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := methods_at(request.app, request.url.path)):
        headers["Allow"] = ", ".join(methods)  # Starlette names those of one route, and a path may have several
    return ApiError(error.status_code, message, headers=headers).response()


def _without_slashes(request: Request) -> str:
    """Return the existing path if the given one only has too many slashes (many base URLs end in one)."""
    path = re.sub("/+", "/", request.url.path).rstrip("/")
    is_there = path not in ("", request.url.path) and methods_at(request.app, path)
    return f"; did you mean {shown(path)}?" if is_there else ""


def methods_at(app: FastAPI, path: str) -> list[str]:
    """Return the methods of ``path``: the documented ones, and HEAD beside GET."""
    paths = app.openapi()["paths"]
    fitting = [path] if path in paths else [one for one in paths if compile_path(one)[0].match(path)]
    methods = {method.upper() for one in fitting for method in paths[one]}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    route = request.scope.get("route")
    queries = [one.field_info.annotation for one in route.dependant.query_params] if isinstance(route, APIRoute) else []
    fields = {name: field for query in queries for name, field in getattr(query, "model_fields", {}).items()}
    failure = from_failure(first_error(error.errors(), fields))
    assert failure is not None
    return failure.response()
