"""The cost model estimates steps of other sizes than the one it chose for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.policies.h200 import STEPS
from engines.parallel.division import TeamSpecs
from engines.planner.cost_model import Workload
from engines.planner.forecast import StepForecast, estimates_of, forecast
from engines.planner.machine import H200
from engines.planner.profile import ModelProfile, profile
from tests.engines.planner.test_cost_model import flux, machine
from tests.engines.support import models

__all__ = ["flux"]

TEXT, TYPICAL = 512, 4096


def plans_of(counted: ModelProfile, sizes: tuple[int, ...]) -> dict[int, tuple[StepForecast, ...]]:
    works = [Workload(lengths=(("text", TEXT), ("image", TYPICAL)), num_branches=number) for number in (1, 2)]
    return {size: tuple(forecast(counted, work, size, H200) for work in works) for size in sizes}


def as_chosen(plans: Mapping[int, tuple[StepForecast, ...]]) -> TeamSpecs:
    return TeamSpecs(by_size={size: tuple(plan.chosen.spec for plan in several) for size, several in plans.items()})


def test_the_step_for_which_was_decided_takes_what_was_predicted(flux: ModelProfile) -> None:
    """The halves of a guided step run side by side, or one after the other."""
    plans = plans_of(flux, (1, 2))
    estimates = estimates_of(plans, as_chosen(plans))
    for num_branches in (1, 2):
        expected = {size: several[num_branches - 1].chosen.total_ms / 1e3 for size, several in plans.items()}
        assert estimates.step_s(TEXT + TYPICAL, num_branches) == pytest.approx(expected, rel=0.02)


def test_another_division_takes_its_own_time(flux: ModelProfile) -> None:
    plans = plans_of(flux, (2,))
    slowest = plans[2][0].costs[-1]
    specs = TeamSpecs(by_size={2: (slowest.spec, plans[2][1].chosen.spec)})
    (step_s,) = estimates_of(plans, specs).step_s(TEXT + TYPICAL, 1).values()
    assert step_s == pytest.approx(slowest.total_ms / 1e3, rel=0.02)
    assert step_s > 1.1 * plans[2][0].chosen.total_ms / 1e3


@pytest.mark.parametrize("size", STEPS)
def test_steps_are_estimated_to_take_about_what_they_were_measured_to(flux: ModelProfile, size: str) -> None:
    """FLUX.1-dev on H200s, on teams of one, two and four, is within a fifth."""
    plans = plans_of(flux, (1, 2, 4))
    width, height = map(int, size.split("x"))
    step_s = estimates_of(plans, as_chosen(plans)).step_s(TEXT + width * height / 16**2, 1)
    assert step_s == pytest.approx(dict(STEPS[size]), rel=0.2)


def test_small_models_gain_little_from_more_ranks() -> None:
    """Tokens alone do not show it: exchanges in the shipped models' steps take longer than their products."""
    counted, slow = profile(models.model("flux")), replace(machine(latency_s=1e-3), quantised={})
    work = Workload(lengths=(("text", 16), ("image", 64)), num_branches=1)
    plans = {size: (forecast(counted, work, size, slow),) for size in (1, 2)}
    step_s = estimates_of(plans, as_chosen(plans)).step_s(80, 1)
    assert step_s[2] > step_s[1]
