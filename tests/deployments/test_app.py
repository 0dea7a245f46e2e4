"""What Serve is told of deployments that are scaled."""

from __future__ import annotations

import warnings

import pytest
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from deployments.app import serve_autoscaling
from deployments.stages.config import AutoscalingConfig

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
