"""What Serve and stages are told of the configuration."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from deployments import app
from deployments.app import build_app, serve_autoscaling
from deployments.config import ApiConfig, AppConfig, ModelConfig, ProvenanceConfig
from deployments.stages.common import StageSpec
from deployments.stages.stage_config import AutoscalingConfig

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
    """Paths are those of who starts the application, wherever its processes run."""
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
