"""GET /health and GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from deployments.api.answers import Health, Model, ModelList
from deployments.api.context import ApiContext
from deployments.api.documents import error_documents
from deployments.api.errors import retry_after
from deployments.requests.rules import find_card

HEALTH_MAX_AGE_S = 1.0


def health_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get(
        "/health",
        response_model=Health,
        responses={503: {"model": Health, "description": "Not every model is ready; the reasons"}},
    )
    async def read_health() -> JSONResponse:
        """200 if every model can take requests, else 503 with the reasons."""
        reasons = await context.studio.not_ready(HEALTH_MAX_AGE_S)
        models = dict.fromkeys(context.studio.cards(), "ready") | dict(reasons)
        ready = bool(models) and not reasons
        health = Health(status="ready" if ready else "not_ready", models=models)
        if ready:
            return JSONResponse(health.model_dump())
        wait_s = max((context.studio.retry_after_s(model) for model in reasons), default=0.0)
        return JSONResponse(health.model_dump(), 503, retry_after(wait_s))

    return router


def model_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["models"], dependencies=[Depends(context.authorize)])

    @router.get("/v1/models", responses=error_documents(401))
    async def list_models() -> ModelList:
        """The models served here."""
        return ModelList(data=[Model.of(card) for card in context.studio.cards().values()])

    @router.get("/v1/models/{model:path}", responses=error_documents(401, 404))
    async def read_model(model: str) -> Model:
        """One model, by its name or an alias: its kind, defaults, limits, and prompts to begin with."""
        return Model.of(find_card(context.studio.cards(), model))

    return router
