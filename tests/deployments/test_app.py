"""The configuration reaches Serve and the stages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
from ray.serve._private.build_app import build_app as build_serve_app
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from deployments import app
from deployments.app import build_app, serve_autoscaling
from deployments.config import ApiConfig, AppConfig, ProvenanceConfig, ShareConfig
from deployments.door.haproxy import PictureQueue
from deployments.model_config import ModelConfig
from deployments.stages.common import StageSpec
from deployments.stages.devices import ALL_GPUS
from deployments.stages.stage_config import ApiScalingConfig, AutoscalingConfig
from deployments.usage.quotas import KeyLimits

OWN_RULE = "`look_back_period_s` .* must be greater than `metrics_interval_s`"


@pytest.mark.parametrize(("look_back_s", "interval_s"), [(3.0, 1.0), (30.0, 10.0), (600.0, 10.0)])
def test_requests_under_way_are_told_several_times_in_a_look_back(look_back_s: float, interval_s: float) -> None:
    config = AutoscalingConfig(look_back_period_s=look_back_s, upscale_delay_s=4.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", OWN_RULE)
        known = ServeAutoscalingConfig(**serve_autoscaling(config))
    assert known.metrics_interval_s == interval_s
    assert (known.look_back_period_s, known.upscale_delay_s) == (look_back_s, 4.0)


def test_serve_itself_warns_of_a_look_back_within_one_interval() -> None:
    with pytest.warns(FutureWarning, match=OWN_RULE):
        ServeAutoscalingConfig(look_back_period_s=3.0)


@pytest.mark.parametrize("stages", ["apart", "together"])
def test_stages_hear_how_files_are_marked(
    stages: Literal["apart", "together"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the application's start, wherever its processes run."""
    specs: list[StageSpec] = []
    bind_stage = app._bind_stage

    def bind(name: str, stage_class: Any, spec: StageSpec, pythons: Any) -> Any:
        specs.append(spec)
        return bind_stage(name, stage_class, spec, pythons)

    monkeypatch.setattr(app, "_bind_stage", bind)
    provenance = ProvenanceConfig(certificate=Path("a.pem"), key=Path("/b.key"))
    api = ApiConfig(metadata="seed", provenance=provenance)
    build_app(AppConfig(models=(ModelConfig(name="flux-shapes", stages=stages),), api=api, fork_workers=False))
    for spec in specs:
        assert spec.metadata == "seed"
        assert spec.provenance == ProvenanceConfig(certificate=Path.cwd() / "a.pem", key=Path("/b.key"))
    assert len(specs) == {"apart": 2, "together": 1}[stages]


def versions(**changes: Any) -> dict[str, str]:
    """Return the version of each deployment of two models; ``changes`` configure the first one."""
    args = {
        "models": [{"name": "a", "path": "flux-shapes", **changes}, {"name": "b", "path": "flux-shapes"}],
        "fork_workers": False,
    }
    built = build_serve_app(build_app(AppConfig.model_validate(args)), name="troupe")
    return {one.name: str(one._deployment_config.version) for one in built.deployments}


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({}, set()),
        ({"denoiser": {"max_waiting_jobs": 7}}, {"Ingress", "TextEncoder-a", "Denoiser-a", "VaeDecoder-a"}),
        ({"denoiser": {"num_replicas": 2}, "decoder": {"num_replicas": 3}}, {"Ingress"}),
        ({"denoiser": {"autoscaling": {"target_wait_s": 5.0, "max_replicas": 3}}}, {"Ingress"}),
        ({"text_encoder": {"autoscaling": {"max_replicas": 2}}}, {"Ingress"}),
    ],
)
def test_a_change_restarts_what_depends_on_it(changes: dict[str, Any], restarted: set[str]) -> None:
    before, after = versions(), versions(**changes)
    assert {name for name, version in after.items() if version != before[name]} == restarted


def test_replicas_of_the_api_scale() -> None:
    scaling = ApiScalingConfig(max_replicas=3)
    limits = KeyLimits(max_concurrent=1)
    api = ApiConfig(autoscaling=scaling, key_limits=(limits,))
    args = AppConfig(models=(ModelConfig(name="flux-shapes"),), api=api, fork_workers=False)
    built = {one.name: one._deployment_config for one in build_serve_app(build_app(args), name="troupe").deployments}
    found = built["Ingress"].autoscaling_config
    assert found is not None
    assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (1, 3, 200)
    assert built["Accounts"].max_ongoing_requests == 3 * api.max_ongoing_requests
    assert PictureQueue.of(args).num_places == 3 * args.max_open_pictures["flux-shapes"]


def test_changed_code_restarts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions()
    monkeypatch.setattr(app, "code_digest", lambda package: "other code")
    after = versions()
    assert [name for name in before if before[name] == after[name]] == []


def test_replicas_have_the_environment_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve passes it only to deployments without a ``runtime_env``, and forked workers have one."""
    own = {"env_vars": {"RELEASE": "2"}, "py_modules": ["s3://bucket/more.zip"]}
    monkeypatch.setattr(app, "application_environment", lambda: own)
    stages = {"decoder": {"num_gpus": 0.5, "num_devices": 2}, "denoiser": {"gpus_per_rank": 0.6}}
    args = AppConfig.model_validate({"models": [{"name": "a", "path": "flux-shapes", **stages}]})
    built = {one.name: one.ray_actor_options for one in build_serve_app(build_app(args), name="troupe").deployments}
    assert len(built) == 4
    for name, options in built.items():
        assert options is not None
        environment = options["runtime_env"]
        more = dict(ALL_GPUS) if name == "VaeDecoder-a" else {}
        assert environment["env_vars"] == {"RELEASE": "2", **more}
        assert environment["py_modules"] == own["py_modules"]
        assert "worker_shim" in environment["py_executable"]


@pytest.mark.parametrize(
    ("memory_gib", "said_gib", "limit_gib"), [(None, None, None), (24.0, None, 0.95 * 24), (24.0, 10.0, 10.0)]
)
def test_parts_that_take_turns_share_the_memory_of_their_model(
    memory_gib: float | None, said_gib: float | None, limit_gib: float | None
) -> None:
    """On a GPU with more memory, both would stay awake beyond the model's limit."""
    stages = {"decoder": {"num_gpus": 0.1}, "denoiser": {"gpus_per_rank": 0.8}}
    encoder = {"num_gpus": 0.1, "takes_turns": True}
    model = ModelConfig.model_validate({"name": "one", "memory_gib": memory_gib, "text_encoder": encoder, **stages})
    shares = {} if said_gib is None else {"one": ShareConfig(memory_gib=said_gib)}
    spec = app._share_spec(model, AppConfig(models=(model,), shares=shares))
    assert spec is not None
    assert (spec.name, spec.config.memory_gib) == ("turns-of-one", limit_gib)
