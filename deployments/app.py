"""The application builder: from a checked configuration to bound Serve deployments.

`serve deploy` looks at the annotation of ``build_app`` for what the ``args`` of a file are to be checked as, and takes
no name for a class: this file evaluates its annotations.
"""

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.config import DEFAULT_METRICS_INTERVAL_S

from deployments.accounts.deployment import AccountsReplica
from deployments.config import AppConfig, ModelConfig
from deployments.ingress import Ingress
from deployments.names import ACCOUNTS, CODEC, INGRESS, deployment_name
from deployments.stages.codec import Codec
from deployments.stages.common import StageSpec
from deployments.stages.config import AutoscalingConfig, DenoiserConfig, StageConfig
from deployments.stages.devices import ALL_GPUS
from deployments.stages.gang.denoiser import Denoiser
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from engines.gang.ranks.placement import gang_bundles, gang_strategy

HEALTH: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.1,
}
REPLICA_CPUS = 0.1
REPORTS_IN_A_LOOK_BACK = 3


def build_app(args: AppConfig) -> serve.Application:
    """Bind one ingress and, for each model, a text encoder, a denoiser (a gang a replica) and a decoder; and who keeps
    account, if keys have limits."""
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=args.api.num_replicas,
        ray_actor_options={"num_cpus": args.api.num_cpus},
        max_ongoing_requests=args.api.max_ongoing_requests,
        **HEALTH,
    )(Ingress)
    return ingress.bind(args, {model.name: _bind_model(model) for model in args.models}, _bind_accounts(args))


def _bind_accounts(args: AppConfig) -> serve.Application | None:
    if not any(limits.is_limited for limits in args.api.key_limits):
        return None
    deployment = serve.deployment(
        name=ACCOUNTS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=args.api.num_replicas * args.api.max_ongoing_requests,
        **HEALTH,
    )(AccountsReplica)
    return deployment.bind(args.api.key_limits)


def _bind_model(model: ModelConfig) -> dict[str, serve.Application]:
    if model.stages == "together":
        encoder = decoder = _bind_stage(f"{CODEC}-{model.name}", Codec, model, model.text_encoder)
    else:
        encoder = _bind_stage(deployment_name("text_encoder", model.name), PromptEncoder, model, model.text_encoder)
        decoder = _bind_stage(deployment_name("decoder", model.name), VaeDecoder, model, model.decoder)
    return {"text_encoder": encoder, "denoiser": _bind_denoiser(model, model.denoiser), "decoder": decoder}


def _bind_stage(
    name: str, stage_class: Callable[..., Any], model: ModelConfig, config: StageConfig
) -> serve.Application:
    options: dict[str, Any] = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
    if config.sees_all_gpus:
        options["runtime_env"] = {"env_vars": dict(ALL_GPUS)}
    deployment = serve.deployment(
        name=name,
        ray_actor_options=options,
        max_ongoing_requests=64,
        **_scale(config.num_replicas, config.autoscaling),
        **HEALTH,
    )(stage_class)
    return deployment.bind(StageSpec(model=model, stage=config))


def _bind_denoiser(model: ModelConfig, config: DenoiserConfig) -> serve.Application:
    """The deployment's placement group holds the gang: bundle 0 the replica, the rest a rank each."""
    deployment = serve.deployment(
        name=deployment_name("denoiser", model.name),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=gang_bundles(config, replica_cpus=REPLICA_CPUS),
        placement_group_strategy=gang_strategy(config),
        # Far above what the gang takes: the gang refuses with a reason, Serve would only queue.
        max_ongoing_requests=4 * (config.max_running_jobs + config.max_waiting_jobs),
        graceful_shutdown_timeout_s=30.0,
        **_scale(config.num_replicas, config.autoscaling),
        **HEALTH,
    )(Denoiser)
    return deployment.bind(model)


def _scale(num_replicas: int, autoscaling: AutoscalingConfig | None) -> dict[str, Any]:
    if autoscaling is None:
        return {"num_replicas": num_replicas}
    return {"num_replicas": "auto", "autoscaling_config": serve_autoscaling(autoscaling)}


def serve_autoscaling(config: AutoscalingConfig) -> dict[str, Any]:
    """Returns what Serve calls ``autoscaling_config``.

    Its controller hears of requests under way several times in a look-back, however short: it would count them as they
    were up to ten seconds ago. Ray 2.60 has environment variables that are to replace ``metrics_interval_s``, and uses
    them nowhere.
    """
    interval_s = min(DEFAULT_METRICS_INTERVAL_S, config.look_back_period_s / REPORTS_IN_A_LOOK_BACK)
    return {**config.model_dump(), "metrics_interval_s": interval_s}
