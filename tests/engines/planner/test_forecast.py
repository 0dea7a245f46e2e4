"""The forecast from a measurement equals the choice."""

from __future__ import annotations

from contextlib import closing

import torch
import torch.distributed as dist

from engines.core.spec import ParallelSpec
from engines.parallel.mesh import Groups, Teams
from engines.planner.cost_model import Workload
from engines.planner.forecast import StepForecast, forecast
from engines.planner.measure import measure
from engines.planner.profile import profile
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang


def forecast_for(work: Workload) -> StepForecast:
    counted = profile(models.model("wan"))
    teams = Teams(rank=dist.get_rank(), num_ranks=2, specs=[ParallelSpec(ulysses=2)], groups=Groups.of_gang())
    return forecast(counted, work, 2, measure(counted, teams, torch.device("cpu")))


def test_auto_makes_the_choice_that_the_forecast_prints() -> None:
    (plan, single), (other, _) = gang(2).run(forecast_and_resolve)
    assert plan.chosen.spec.name == single == other.chosen.spec.name


def forecast_and_resolve() -> tuple[StepForecast, str]:
    """Return both from one machine's figures: two measurements differ."""
    from dataclasses import replace
    from unittest.mock import patch

    model = models.model("wan")
    work = Workload(lengths=(("video", 900),), num_branches=1)
    plan = forecast_for(work)
    typical = replace(model, typical_lengths={"video": 900})
    with patch("engines.planner.auto.measure", lambda *_: plan.machine), closing(TorchEngine(typical)) as engine:
        return plan, engine.division.specs.of(2)[0].name
