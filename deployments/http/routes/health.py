"""GET /health, GET /live and GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.answers import Health, Model, ModelList
from deployments.http.context import ApiContext
from deployments.http.drain import Drain, stopping
from deployments.http.errors import retry_after
from deployments.http.openapi_text import error_documents
from deployments.names import HEALTH, LIVE
from deployments.requests.model_choice import check_name, find_card, split_name
from deployments.requests.rules import Requester

HEALTH_MAX_AGE_S = 1.0


def health_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get(
        HEALTH,
        response_model=Health,
        responses={503: {"model": Health, "description": "Not every model is ready; the reasons"}},
    )
    async def read_health() -> JSONResponse:
        """Return 200 if every model takes requests, else 503 with the reasons."""
        reasons = await context.service.not_ready(HEALTH_MAX_AGE_S)
        models = dict.fromkeys(context.service.cards(), "ready") | dict(reasons)
        ready = bool(models) and not reasons
        storage = str(await context.clips.storage_problem() or "ok")
        health = Health(status="ready" if ready else "not_ready", models=models, storage=storage)
        if ready:
            return JSONResponse(health.model_dump())
        wait_s = max((context.service.retry_after_s(model) for model in reasons), default=0.0)
        return JSONResponse(health.model_dump(), 503, retry_after(wait_s))

    return router


class Liveness:
    """Answers ``GET /live``: 200 while this replica takes requests, 503 once it drains.

    Load balancers poll it, so it makes no call, and is neither logged nor counted.
    """

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != LIVE or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        answer = stopping().response() if self.drain.has_begun else JSONResponse({"status": "live"})
        await answer(scope, receive, send)


def model_routes(context: ApiContext) -> APIRouter:
    authorized = Depends(context.authorize)
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=error_documents(401, 503))
    async def list_models(requester: Requester = authorized) -> ModelList:
        """List the served models."""
        await context.service.look()
        cards = await context.cards(requester)
        return ModelList(data=[model for card in cards.values() for model in Model.all_of(card)])

    @router.get("/v1/models/{model:path}", responses=error_documents(401, 404, 503))
    async def read_model(model: str, requester: Requester = authorized) -> Model:
        """Return one model by its name or alias: its kind, defaults, limits and example prompts."""
        if not model.strip("/"):
            raise HTTPException(404)
        await context.service.look()
        card = find_card(await context.cards(requester), model)
        lora = split_name(model)[1]
        if lora is None:
            return Model.of(card)
        if lora not in card.recipes:
            check_name(lora, card, "model", code="model_not_found")
        return next(one for one in Model.all_of(card) if split_name(one.id)[1] == lora)

    return router
