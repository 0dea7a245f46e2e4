"""Serve deployment at the door: the HTTP API, and ``generate`` for Python handles."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api.app import create_api
from deployments.api.drain import Drain
from deployments.api.settings import ApiLimits, ApiSettings
from deployments.clips.clips import Clips
from deployments.clips.settings import ClipLimits, ClipSettings
from deployments.config import AppConfig
from deployments.observability.exposition import Counted, Exposition, counted_here
from deployments.replicas import prepare_replica
from deployments.requests.handle import handle_request
from deployments.settings import Settings
from deployments.studio.flow import DeployedStudio, StageHandles
from deployments.studio.interface import ModelCard, StudioEvent
from deployments.studio.readiness import Readiness
from pipelines.checkpoint import Checkpoint


def make_cards(config: AppConfig) -> dict[str, ModelCard]:
    """Returns what the served models say about themselves. Reads configuration files only, no weights."""
    cards: dict[str, ModelCard] = {}
    for model in config.models:
        checkpoint = Checkpoint.open(model.source, weights=False)
        cards[model.name] = ModelCard(
            name=model.name, family=checkpoint.family.name, created=int(time.time()), defaults=checkpoint.defaults
        )
    return cards


@serve.ingress()
class Ingress:
    """``stages`` maps model to stage to handle (Serve turns bound deployments into handles)."""

    def __init__(self, config: AppConfig, stages: Mapping[str, Mapping[str, DeploymentHandle[Any]]]) -> None:
        prepare_replica()
        self._config, self._settings = config, Settings()
        for handle in (handle for by_stage in stages.values() for handle in by_stage.values()):
            # In this loop, where calls are made, and not one thread further.
            handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
        handles = {model: StageHandles(**by_stage) for model, by_stage in stages.items()}
        cards = make_cards(config)
        self._studio = DeployedStudio(cards, handles, Readiness(cards))
        self._clips = Clips(self._studio, self._clip_settings())
        self._drain = Drain()
        self._exposition = Exposition(
            config.metrics, {model: stage_handles.denoiser for model, stage_handles in handles.items()}
        )

    async def generate(self, prompt: str, **fields: Any) -> AsyncGenerator[StudioEvent]:
        """Serves Python handles: ``handle.options(stream=True).generate.remote("a red circle", seed=1)``.

        Yields ``Progress`` for every step, ``Preview`` if asked for (``partial_images``; clips always have some),
        and at last ``Media`` with the bytes. ``fields`` are those of the HTTP API; ValueError names a wrong one.
        Cancelling the response stops the job on all ranks.
        """
        request, output = handle_request(self._studio.cards(), uuid.uuid4().hex, {"prompt": prompt, **fields})
        async with aclosing(self._studio.perform(request, output)) as events:
            async for event in events:
                yield event

    async def metrics(self) -> Counted:
        """Returns this replica's name, and what it has counted."""
        return counted_here()

    async def drain(self, grace_s: float) -> None:
        """Ends with care: clips are queued again, new requests refused, and those under way have ``grace_s`` to end.

        To be called on every replica before the application is deleted (``DeploymentHandle.broadcast``).
        """
        draining = asyncio.create_task(self._drain.finish(grace_s))
        await self._clips.stop()
        await draining

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._studio, self._api_settings(), self._clips, self._drain)

    def _api_settings(self) -> ApiSettings:
        return ApiSettings(
            data_dir=self._data_dir,
            api_keys=self._settings.all_api_keys,
            sends_request_id=False,
            **self._config.api.part(ApiLimits),
        )

    def _clip_settings(self) -> ClipSettings:
        return ClipSettings(
            data_dir=self._data_dir,
            database_url=self._settings.database_url,
            **self._config.api.part(ClipLimits),
        )

    @property
    def _data_dir(self) -> Path:
        return self._config.api.data_dir or self._settings.data_dir
