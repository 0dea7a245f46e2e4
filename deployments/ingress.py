"""Serve deployment of the HTTP API, with ``generate`` for Python handles."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.clips.clips import Clips
from deployments.clips.settings import ClipLimits, ClipSettings
from deployments.clips.webhooks import WebhookSettings
from deployments.config import AppConfig
from deployments.http.app import create_api
from deployments.http.drain import Drain
from deployments.http.settings import ApiLimits, ApiSettings
from deployments.lora_store import LoraStore, lora_folder
from deployments.model_config import ModelConfig
from deployments.observability.exposition import Exposition, ReplicaMetrics, replica_metrics
from deployments.ray_private import route_in_this_loop, serve_host
from deployments.replicas import prepare_replica
from deployments.requests.handle import handle_request
from deployments.requests.prompt_enhancer import PromptEnhancers
from deployments.requests.recipe_choice import recipe_problems
from deployments.service.flow import DeployedService, QueueLimits
from deployments.service.interface import ModelCard, ServiceEvent
from deployments.service.readiness import Readiness
from deployments.service.retries import RECOVERY_DEADLINE_S
from deployments.service.run import StageHandles
from deployments.settings import Settings
from deployments.stages.measured_times import start_times_of
from deployments.stages.stage_config import DenoiserConfig
from deployments.usage.accounts import Accounts
from deployments.usage.deployed_keeper import DeployedKeeper
from pipelines.checkpoint import Checkpoint
from pipelines.directory import changed_at_s
from pipelines.lora.source import named
from pipelines.recipes import merged

NO_MEMORY: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def make_cards(config: AppConfig, memory: Mapping[str, Mapping[str, Any]] = NO_MEMORY) -> dict[str, ModelCard]:
    """Return the cards of the served models, from configuration files only. ValueError if one refuses its recipes.

    ``memory``: see ``ModelCard``, by model.
    """
    enhancers = {name: enhancer.default for name, enhancer in config.prompt_enhancers.items()}
    cards = {
        model.name: make_card(model, enhances_prompts=enhancers.get(model.name), memory=memory.get(model.name))
        for model in config.models
    }
    if problems := [problem for card in cards.values() for problem in recipe_problems(card)]:
        raise ValueError("\n".join(problems))
    return cards


def make_card(
    model: ModelConfig, *, enhances_prompts: bool | None = None, memory: Mapping[str, Any] | None = None
) -> ModelCard:
    """Return the card of a model, whose recipes are not checked."""
    checkpoint = Checkpoint.open(model.source, weights=False)
    return ModelCard(
        name=model.name,
        family=checkpoint.spec.family,
        created=changed_at_s(checkpoint.path),
        defaults=checkpoint.defaults.with_adapters(
            has_merged=any(not one.name for one in model.adapters),
            has_named=any(one.name for one in model.adapters) or model.runtime_loras is not None,
        ),
        aliases=model.aliases,
        loras=named(model.adapters),
        recipes=merged(model.recipes, checkpoint.recipes),
        qualities=model.qualities,
        description=checkpoint.description,
        enhances_prompts=enhances_prompts,
        path="whole pipeline" if checkpoint.spec.is_whole else "blocks",
        forwards="eager" if checkpoint.spec.is_whole and not model.denoiser.compile else None,
        runtime_loras=model.runtime_loras,
        memory=memory,
        attentions=model.attentions,
    )


def own_names() -> tuple[str, ...]:
    """Return the names of this cluster's machines, and the server's own address."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    machines = {socket.gethostname(), *(str(node["NodeManagerHostname"]) for node in nodes)}
    with ThreadPoolExecutor(1) as pool:  # Ray warns of calls that block an event loop
        host = pool.submit(serve_host).result()
    return tuple(sorted(machines | {f"{machine}.local" for machine in machines} | {host}))


def patience_for(config: DenoiserConfig) -> float:
    """Return the seconds that a request waits for a gang; with scaling to zero, at least the start deadline."""
    return max(RECOVERY_DEADLINE_S, config.start_deadline_s) if config.starts_on_demand else RECOVERY_DEADLINE_S


def names_on_demand(config: AppConfig, stages: Mapping[str, Mapping[str, DeploymentHandle[Any]]]) -> frozenset[str]:
    """Return the names of the deployments that scale to zero replicas."""
    scaled = ((model, stage, handle) for model in config.models for stage, handle in stages[model.name].items())
    return frozenset(
        handle.deployment_name for model, stage, handle in scaled if getattr(model, stage).starts_on_demand
    )


def make_enhancers(config: AppConfig) -> PromptEnhancers:
    """Return the prompt enhancers, with their keys. ValueError if the environment lacks one."""
    keys = {name: Settings.secret(name) for name in config.enhancer_key_variables}
    return PromptEnhancers(config.prompt_enhancers, keys)


def make_accounts(config: AppConfig, keeper: DeploymentHandle[Any] | None) -> Accounts:
    """Return the accounts of keys, shared by all replicas through ``keeper`` if there is one."""
    if keeper is None:
        return Accounts(config.api.key_limits)
    replica = serve.get_replica_context().replica_id.unique_id
    return Accounts(config.api.key_limits, DeployedKeeper(keeper), replica)


@serve.ingress()
class Ingress:
    """``stages`` maps model to stage to handle; ``keeper`` holds the accounts of limited keys.

    The models ``deployed`` earlier are perhaps being replaced by a new version. ``memory``: see ``make_cards``.
    """

    def __init__(
        self,
        config: AppConfig,
        stages: Mapping[str, Mapping[str, DeploymentHandle[Any]]],
        keeper: DeploymentHandle[Any] | None = None,
        deployed: Collection[str] = (),
        memory: Mapping[str, Mapping[str, Any]] = NO_MEMORY,
    ) -> None:
        prepare_replica()
        self._config, self._settings = config, Settings()
        self._keys, self._enhancers = self._settings.key_ring(), make_enhancers(config)
        deployments = {
            model: {handle.deployment_name: handle for handle in by_stage.values()}
            for model, by_stage in stages.items()
        }
        handles_of_stages = [handle for by_name in deployments.values() for handle in by_name.values()]
        for handle in [*handles_of_stages, *([] if keeper is None else [keeper])]:
            route_in_this_loop(handle)
        handles = {model.name: StageHandles(**stages[model.name]) for model in config.models}
        cards = make_cards(config, memory)
        patience_s = {model.name: patience_for(model.denoiser) for model in config.models}
        self._accounts = make_accounts(config, keeper)
        readiness = Readiness(deployments, names_on_demand(config, stages), deployed, start_times_of(config))
        limits = {
            model.name: QueueLimits(max_jobs=model.max_jobs, max_wait_s=model.denoiser.max_wait_s)
            for model in config.models
        }
        self._service = DeployedService(cards, handles, readiness, patience_s, self._accounts, limits)
        self._clips = Clips(self._service, self._clip_settings())
        self._loras = LoraStore(database=self._clips.database, root=lora_folder(self._data_dir))
        self._drain = Drain()
        self._exposition = Exposition(
            config.metrics, {model: stage_handles.denoiser for model, stage_handles in handles.items()}
        )

    async def generate(self, prompt: str, **fields: Any) -> AsyncGenerator[ServiceEvent]:
        """Serve Python handles: ``handle.options(stream=True).generate.remote("a red circle", seed=1)``.

        Yield ``Queued``, ``Progress`` for every step, ``Preview`` (with ``partial_images``, and for clips), and finally
        ``Media``. ``fields`` are fields of the HTTP API, and ``kind`` (image or video) for models that make both.
        ValueError names an invalid one. Pictures (``image``, ``mask``, ``input_reference``) are the bytes of files.
        Cancelling the response stops the job on all ranks.
        """
        cards = await self._loras.on_cards(self._service.cards(), "")
        arguments = (cards, uuid.uuid4().hex, {"prompt": prompt, **fields}, self._config.api)
        request, output, pictures = await asyncio.to_thread(handle_request, *arguments)
        request = await self._enhancers.enhanced(request)
        async with aclosing(self._service.perform(request, output, pictures)) as events:
            async for event in events:
                yield event

    async def metrics(self) -> ReplicaMetrics:
        """Return this replica's name and its metrics."""
        return replica_metrics()

    async def drain(self, grace_s: float) -> None:
        """Requeue clips, refuse new requests, and give running ones ``grace_s`` to finish.

        Call it on every replica before the application is deleted (``DeploymentHandle.broadcast``).
        """
        self._service.meter.stop()
        draining = asyncio.create_task(self._drain.finish(grace_s))
        await self._clips.stop()
        await draining

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(
            self._service, self._api_settings(), self._clips, self._drain, self._accounts, self._enhancers
        )

    def _api_settings(self) -> ApiSettings:
        return ApiSettings(
            data_dir=self._data_dir,
            keys=self._keys,
            own_names=own_names(),
            sends_request_id=False,
            max_open_pictures={
                model: limit
                for model, limit in self._config.max_open_pictures.items()
                if "image" in self._service.cards()[model].defaults.kinds
            },
            signed_urls=self._config.api.signed_urls,
            is_only_replica=self._config.api.max_num_replicas == 1,
            **self._config.api.part(ApiLimits),
        )

    def _clip_settings(self) -> ClipSettings:
        return ClipSettings(
            data_dir=self._data_dir,
            storage=self._config.api.storage,
            webhooks=self._config.api.webhooks or WebhookSettings(),
            database_url=self._settings.database_url or self._config.api.database,
            num_gangs={model.name: model.denoiser.max_num_replicas for model in self._config.models},
            **self._config.api.part(ClipLimits),
        )

    @property
    def _data_dir(self) -> Path:
        return self._config.api.data_dir or self._settings.data_dir
