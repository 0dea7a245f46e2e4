"""The application builder: from a validated configuration to bound Serve deployments.

`serve deploy` validates a file's ``args`` by the annotation of ``build_app``. It must be a class, not a string, so this
file evaluates its annotations.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from pydantic_core import to_json
from ray import serve
from ray.serve.config import DEFAULT_METRICS_INTERVAL_S

from deployments.autoscaling import DECIDE_EVERY_S, LOOK_BACK_S
from deployments.config import AppConfig, ShareConfig
from deployments.forked_workers import Level, Pythons, application_environment, worker_pythons
from deployments.ingress import Ingress
from deployments.model_config import ModelConfig
from deployments.names import ACCOUNTS, CODEC, INGRESS, STAGES, deployment_name
from deployments.ray_private import deployment_names, with_version
from deployments.sharing.share_actor import ShareSpec
from deployments.sizing.memory_budget import with_budgets
from deployments.stages.common import StageSpec
from deployments.stages.denoiser import Denoiser
from deployments.stages.devices import ALL_GPUS
from deployments.stages.stage_config import AutoscalingConfig, DenoiserConfig, StageConfig
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import Codec, VaeDecoder
from deployments.usage.deployed_keeper import AccountsReplica
from engines.core.storage import code_digest
from engines.gang.load import REPLICAS_PER_REPORT_S, REPORT_EVERY_S
from engines.gang.placement import gang_bundles, gang_strategy
from engines.gang.share_group import USABLE

HEALTH: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 2.0,
    "graceful_shutdown_wait_loop_s": 0.1,
}
INGRESS_HEALTH: dict[str, Any] = {**HEALTH, "health_check_period_s": 0.5, "health_check_timeout_s": 1.0}
"""A hanging ingress blocks each replica whose stream to it has ended, until it acknowledges the last item: Ray waits in
the replica's event loop. The ingress is killed before such a replica misses three health checks."""
INGRESS_SURGE_PERCENT = 1
"""One more replica than configured while a new version rolls out: a replica ends when its successor runs."""
REPLICA_CPUS = 0.1
REPORTS_IN_A_LOOK_BACK = 3
POLICY = "deployments.autoscaling:ScaleByWork"
ROUTER = "deployments.request_router:FinishTimeRouter"
DRAIN_S = 600.0
"""Time that an ingress has to finish its requests, which may wait for a new gang. Also the time that a gang has to
finish its jobs, if it scales by predicted work. Serve chooses which replica ends."""
SHORT_DRAIN_S = 120.0
"""The same for other gangs: shorter than a spot instance's notice, and than ``RECOVERY_DEADLINE_S``.

Requests wait that long if the model has no other gang."""
CODE = ("engines", "pipelines", "deployments")
"""Packages whose code is part of each version."""


def build_app(args: AppConfig) -> serve.Application:
    """Bind one ingress and, for each model, a text encoder, a denoiser (one gang per replica) and a decoder.

    ValueError for a model that does not fit its ``memory_gib``.
    """
    args, budgets = with_budgets(args)
    memory = {name: budget.document() for name, budget in budgets.items()}
    pythons = worker_pythons() if args.fork_workers else {}
    ingress = _deployment(
        Ingress,
        args,
        name=INGRESS,
        **_scale(args.api.num_replicas, args.api.autoscaling),
        ray_actor_options=_actor("base", pythons, num_cpus=args.api.num_cpus),
        max_ongoing_requests=args.api.max_ongoing_requests,
        max_surge_percent=INGRESS_SURGE_PERCENT,
        graceful_shutdown_timeout_s=DRAIN_S,
        **INGRESS_HEALTH,
    )
    models = {model.name: _bind_model(model, args, pythons, _share_spec(model, args)) for model in args.models}
    return ingress.bind(args, models, _bind_accounts(args, pythons), deployed_models(args), memory)


def _deployment(target: Callable[..., Any], *content: object, **options: Any) -> serve.Deployment:
    """Return a deployment whose replicas restart when ``content`` or the code has changed, one after the other."""
    code = [code_digest(package) for package in CODE]
    version = hashlib.sha256(to_json([code, target.__name__, content], fallback=str)).hexdigest()
    return with_version(serve.deployment(**options)(target), version)


def deployed_models(args: AppConfig) -> frozenset[str]:
    """Return the models that the running application has, whose gangs this deployment may replace."""
    known = deployment_names() if ray.is_initialized() else frozenset()
    return frozenset(model.name for model in args.models if deployment_name("denoiser", model.name) in known)


def _without_scale(model: ModelConfig) -> ModelConfig:
    """Return ``model`` without numbers of replicas, on which its processes do not depend: they outlive a change."""
    sections = {stage: replace(getattr(model, stage), num_replicas=1, autoscaling=None) for stage in STAGES}
    return model.model_copy(update=sections)


def _share_spec(model: ModelConfig, args: AppConfig) -> ShareSpec | None:
    """Return the group of ``model``, its own if its encoder takes turns; None if its weights never sleep.

    Parts that take turns share the model's ``memory_gib``, which may be less than the GPU has.
    """
    if not model.sleeps:
        return None
    if model.share:
        config = args.shares.get(model.share, ShareConfig())
        return ShareSpec(name=model.share, config=config, models=args.sharing(model.share))
    config = args.shares.get(model.name, ShareConfig())
    if model.memory_gib is not None and config.memory_gib is None:
        config = replace(config, memory_gib=USABLE * model.memory_gib)
    return ShareSpec(name=f"turns-of-{model.name}", config=config, models=(_without_scale(model),))


def _actor(level: Level, pythons: Pythons, **options: Any) -> dict[str, Any]:
    """Return ``ray_actor_options`` for a process with the libraries of ``level``.

    Serve gives the application's ``runtime_env`` to deployments without one only, so it is merged here.
    """
    python = {"py_executable": pythons[level]} if pythons else {}
    own, of_application = options.pop("runtime_env", {}), application_environment()
    variables = {**of_application.get("env_vars", {}), **own.get("env_vars", {})}
    runtime_env = {**of_application, **python, **own, **({"env_vars": variables} if variables else {})}
    return {**options, **({"runtime_env": runtime_env} if runtime_env else {})}


def _bind_accounts(args: AppConfig, pythons: Pythons) -> serve.Application | None:
    if not any(limits.is_limited for limits in args.api.key_limits):
        return None
    deployment = _deployment(
        AccountsReplica,
        args.api.key_limits,
        name=ACCOUNTS,
        ray_actor_options=_actor("base", pythons, num_cpus=0),
        max_ongoing_requests=args.api.max_num_replicas * args.api.max_ongoing_requests,
        **HEALTH,
    )
    return deployment.bind(args.api.key_limits)


def _bind_model(
    model: ModelConfig, args: AppConfig, pythons: Pythons, share: ShareSpec | None
) -> dict[str, serve.Application]:
    api = args.api
    provenance = api.provenance.absolute() if api.provenance else None

    def bind(name: str, stage_class: Callable[..., Any], config: StageConfig) -> serve.Application:
        spec = StageSpec(model=model, stage=config, metadata=api.metadata, provenance=provenance, share=share)
        return _bind_stage(name, stage_class, spec, pythons)

    if model.stages == "together":
        encoder = decoder = bind(f"{CODEC}-{model.name}", Codec, model.text_encoder)
    else:
        encoder = bind(deployment_name("text_encoder", model.name), PromptEncoder, model.text_encoder)
        decoder = bind(deployment_name("decoder", model.name), VaeDecoder, model.decoder)
    denoiser = _bind_denoiser(model, pythons, args.max_ranks, share)
    return {"text_encoder": encoder, "denoiser": denoiser, "decoder": decoder}


def _bind_stage(name: str, stage_class: Callable[..., Any], spec: StageSpec, pythons: Pythons) -> serve.Application:
    config = spec.stage
    alone = replace(spec, model=_without_scale(spec.model), stage=replace(config, num_replicas=1, autoscaling=None))
    environment = {"runtime_env": {"env_vars": dict(ALL_GPUS)}} if config.sees_all_gpus else {}
    deployment = _deployment(
        stage_class,
        alone,
        name=name,
        ray_actor_options=_actor("model", pythons, num_cpus=config.num_cpus, num_gpus=config.num_gpus, **environment),
        max_ongoing_requests=64,
        **_scale(config.num_replicas, config.autoscaling),
        **HEALTH,
    )
    return deployment.bind(alone)


def _bind_denoiser(
    model: ModelConfig, pythons: Pythons, max_ranks: int | None, share: ShareSpec | None
) -> serve.Application:
    """Bind the gang to its placement group: bundle 0 is the replica's, each other one a rank's.

    Gangs that share GPUs are in the placement group of their share group.
    """
    config = model.denoiser
    scaling = config.autoscaling
    by_work = scaling is not None and scaling.target_wait_s is not None
    bundles: dict[str, Any] = {
        "placement_group_bundles": gang_bundles(config, replica_cpus=REPLICA_CPUS),
        "placement_group_strategy": gang_strategy(config),
    }
    alone, drain_s = _without_scale(model), DRAIN_S if by_work else SHORT_DRAIN_S
    deployment = _deployment(
        Denoiser,
        alone,
        share,
        name=deployment_name("denoiser", model.name),
        ray_actor_options=_actor("base", pythons, num_cpus=REPLICA_CPUS),
        # Far above the gang's limit: the gang refuses with a reason, Serve would only queue.
        max_ongoing_requests=4 * (config.max_running_jobs + config.max_waiting_jobs),
        graceful_shutdown_timeout_s=drain_s,
        **({} if share is not None else bundles),
        **_routing(config),
        **(work_scaling(config, max_ranks) if by_work else _scale(config.num_replicas, scaling)),
        **HEALTH,
    )
    return deployment.bind(alone, share, drain_s)


def _routing(config: DenoiserConfig) -> dict[str, Any]:
    """Return the options by which requests find the best of several gangs."""
    if config.max_num_replicas == 1:
        return {}
    period_s = max(REPORT_EVERY_S, config.max_num_replicas / REPLICAS_PER_REPORT_S)
    return {"request_router_config": {"request_router_class": ROUTER, "request_routing_stats_period_s": period_s}}


def _scale(num_replicas: int, autoscaling: AutoscalingConfig | None) -> dict[str, Any]:
    if autoscaling is None:
        return {"num_replicas": num_replicas}
    return {"num_replicas": "auto", "autoscaling_config": serve_autoscaling(autoscaling)}


def serve_autoscaling(config: AutoscalingConfig) -> dict[str, Any]:
    """Return Serve's ``autoscaling_config`` for scaling by open requests.

    Replicas report open requests several times per look-back period; Serve's default of ten seconds may exceed it. Ray
    2.60 has environment variables in place of ``metrics_interval_s``, but never reads them.
    """
    interval_s = min(DEFAULT_METRICS_INTERVAL_S, config.look_back_period_s / REPORTS_IN_A_LOOK_BACK)
    return {**config.model_dump(include={*AutoscalingConfig.model_fields}), "metrics_interval_s": interval_s}


def work_scaling(config: DenoiserConfig, max_ranks: int | None) -> dict[str, Any]:
    """Return the options of a deployment that scales by predicted work. The policy itself delays its decisions."""
    scaling = config.autoscaling
    assert scaling is not None
    kwargs = {
        "target_wait_s": scaling.target_wait_s,
        "min_gangs": scaling.min_replicas,
        "max_gangs": scaling.max_replicas,
        "idle_s": scaling.idle_s,
        "priority": scaling.priority,
        "gangs_per_node": scaling.gangs_per_node,
        "num_ranks": config.num_ranks,
        "max_ranks": max_ranks,
    }
    by_serve = {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": DECIDE_EVERY_S,
        "policy": {"policy_function": POLICY, "policy_kwargs": kwargs},
    }
    return {"num_replicas": "auto", "autoscaling_config": by_serve}
