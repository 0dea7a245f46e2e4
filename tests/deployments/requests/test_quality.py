"""Qualities are numbers of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.requests.fields import Quality
from deployments.requests.rules import quality_steps
from tests.deployments.support.fake_service import PICTURES


@pytest.mark.parametrize(("quality", "num_steps"), [("low", 2), ("medium", 4), ("high", 6)])
def test_steps_are_a_share_of_the_models_own(quality: Quality, num_steps: int) -> None:
    assert quality_steps(quality, PICTURES) == num_steps
    assert quality_steps(quality, replace(PICTURES, max_steps=3)) == min(num_steps, 3)
    assert quality_steps(quality, replace(PICTURES, min_steps=4, max_steps=4)) == 4
