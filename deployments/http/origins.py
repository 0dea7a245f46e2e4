"""Requests from web pages of other origins are refused, unless the configuration allows the origin.

Any page can make a browser send forms, and JSON without its content type, to any server without asking it first.
The rule is that of Go's ``http.CrossOriginProtection``: https://words.filippo.io/csrf/ says why it is enough.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.errors import ApiError
from deployments.http.hosts import forwarded, is_from_proxy, place_of
from deployments.http.openapi_text import HEADERS
from deployments.http.settings import ApiSettings
from deployments.requests.request_errors import shown

CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class OriginCheck:
    """Refuses with 403 what a page of another origin wants changed."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or is_welcome(scope, self.settings):
            await self.app(scope, receive, send)
            return
        await refusal(Headers(scope=scope)).response()(scope, receive, send)


def is_welcome(scope: Scope, settings: ApiSettings) -> bool:
    """Return whether the request comes from no web page, a page of the server, or an allowed origin."""
    headers = Headers(scope=scope)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site in ("same-origin", "none"):
        return True
    if origin is not None and is_allowed(origin, settings.allowed_origins):
        return True
    if site is not None:
        return False
    return origin is None or place_of(origin) in own_places(scope, settings)


def is_allowed(origin: str, allowed: Collection[str]) -> bool:
    return "*" in allowed or origin in allowed


def own_places(scope: Scope, settings: ApiSettings) -> set[str]:
    """Return the hosts, with ports, of the server's own pages."""
    connection = HTTPConnection(scope)
    places = {connection.headers.get("host", "").lower(), place_of(settings.public_url)}
    if is_from_proxy(connection, settings):
        places.add(forwarded(connection, "host"))
    return places - {""}


def refusal(headers: Headers) -> ApiError:
    origin = headers.get("origin")
    page = f"A page of {shown(origin)}" if origin else "A page of another origin"
    message = f"{page} may change nothing here; to allow it, add its origin to api.allowed_origins"
    return ApiError(403, message, code="origin_not_allowed")


class Cors(CORSMiddleware):
    """Lets pages of allowed origins read answers (Fetch Standard, section 3.2). Its refusals have OpenAI's shape."""

    def __init__(self, app: ASGIApp, *, allowed_origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(allowed_origins),
            allow_methods=CORS_METHODS,
            allow_headers=("*",),
            allow_private_network=True,  # of these origins alone: the configuration names them
            expose_headers=tuple(HEADERS),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        if not self.is_allowed_origin(request_headers["origin"]):
            return refusal(request_headers).response()
        method, allowed = shown(request_headers["access-control-request-method"]), ", ".join(CORS_METHODS)
        error = ApiError(405, f"Pages may not send {method} here; allowed: {allowed}", headers={"Allow": allowed})
        response = error.response()
        response.headers["Access-Control-Allow-Origin"] = answer.headers["Access-Control-Allow-Origin"]
        return response
