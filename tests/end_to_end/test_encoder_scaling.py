"""Encoders of a running application scale with prompts, and no request is lost."""

from __future__ import annotations

import pytest

from deployments.cli.serving import parse_config
from deployments.names import deployment_name
from pipelines.loading import SHIPPED
from tests.deployments.support.live import asked_for, config_of, footprint, live, picture, wait_until

pytestmark = pytest.mark.slow

MODEL = "flux-shapes"
ENCODER = deployment_name("text_encoder", MODEL)
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 0.1,
    "look_back_period_s": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2,
}
"""Most of a request's time is its gang's, so far fewer than one on average is in an encoder."""
NUM_CLIENTS = 6
SHORT, LONG = {"num_inference_steps": 1}, {"num_inference_steps": 24}


def test_encoders_come_with_prompts_and_go(ray_cluster: None) -> None:
    """This happens under load: the encoder that ends has made conditionings that gangs may not have read yet."""
    document = config_of({MODEL: SHIPPED / MODEL}).model_dump(mode="json")
    (model,) = document["applications"][0]["args"]["models"]
    model["text_encoder"] |= {"autoscaling": SCALING, "conditionings_mib": 0}  # every prompt is encoded
    with live(parse_config(document)) as url:
        short = [picture(url, seed=seed, **SHORT) for seed in range(NUM_CLIENTS)]
        long = [picture(url, seed=0, **LONG)]
        wait_until(lambda: footprint()[ENCODER] == 1, "one encoder without requests")
        with asked_for(url, short, num_clients=NUM_CLIENTS, **SHORT):
            wait_until(lambda: footprint()[ENCODER] == 2, "another encoder")
        with asked_for(url, long, **LONG):
            wait_until(lambda: footprint()[ENCODER] == 1, "one client needs one encoder")
