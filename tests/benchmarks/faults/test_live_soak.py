"""A short soak of the laptop's application under each policy, with a gang that loses ranks on the way."""

from __future__ import annotations

import psutil
import pytest

from benchmarks.faults.__main__ import parse, soak, with_policy
from deployments.cli.serving import load_config
from engines.gang.policies.policy import POLICIES
from tests.deployments.support.live import live
from tests.support.ports import own_port

EARLY = "28"
"""Seed with which the first kill comes after 1.4 s."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_loses_nothing(ray_cluster: None, policy: str) -> None:
    port = own_port("metrics of a soak")
    config = with_policy(load_config("laptop").with_http(port=0).with_metrics(port), policy)
    words = ["--policy", policy, "--requests", "60", "--every-s", "20", "--seed", EARLY, "--kinds", "rank"]
    with live(config) as url:
        document = await soak(url, f"http://127.0.0.1:{port}/metrics", psutil.Process(), ("",), parse(words))
    assert (document["lost"], document["unsettled"]) == ([], [])
    assert sum(document["ends"].values()) == 60
    assert document["ends"]["right"] > 0
    assert document["kills"]
