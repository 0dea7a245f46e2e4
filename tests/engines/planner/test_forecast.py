"""What is predicted from a measurement is what happens: CPU ranks run strategies in the order of their predictions."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import torch
import torch.distributed as dist

from engines.core.spec import ParallelSpec
from engines.parallel.mesh import Groups, Teams
from engines.planner.cost_model import Workload
from engines.planner.forecast import StepForecast, forecast, workload
from engines.planner.measure import measure
from engines.planner.profile import profile
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang

STRATEGIES = ("guidance2", "ulysses2", "tensor2")
"""For a small step of two branches: 1 exchange, 18 and 58."""

NUM_ROUNDS = 8
RANKS = (0, 1)


def test_strategies_run_in_the_order_of_their_predictions() -> None:
    plan, ran_ms = gang(2).run(predict_and_time)[0]
    predicted = [cost.spec.name for cost in plan.costs if cost.spec.name in STRATEGIES]
    assert predicted == sorted(ran_ms, key=lambda name: ran_ms[name]), (plan.table(), ran_ms)
    assert plan.chosen.spec.name == predicted[0] == "guidance2"


def predict_and_time() -> tuple[StepForecast, dict[str, float]]:
    """Milliseconds by strategy: the fastest of some rounds, in which they take turns."""
    branches = models.branches("wan", "even", num=2)
    shortest_ms = dict.fromkeys(STRATEGIES, float("inf"))
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(engine_for(name))) for name in STRATEGIES}
        for number in range(1 + NUM_ROUNDS):
            for name, engine in engines.items():
                dist.barrier()
                started_s = time.perf_counter()
                engine.predict(branches, RANKS)
                if number:
                    shortest_ms[name] = min(shortest_ms[name], 1e3 * (time.perf_counter() - started_s))
    return forecast_for(workload(models.model("wan"), branches)), shortest_ms


def engine_for(strategy: str) -> TorchEngine:
    return TorchEngine(models.model("wan"), strategy=strategy)


def forecast_for(work: Workload) -> StepForecast:
    counted = profile(models.model("wan"))
    teams = Teams(rank=dist.get_rank(), num_ranks=2, specs=[ParallelSpec(ulysses=2)], groups=Groups(2))
    return forecast(counted, work, 2, measure(counted, teams, torch.device("cpu")))


def test_auto_makes_the_choice_that_the_forecast_prints() -> None:
    (plan, single), (other, _) = gang(2).run(forecast_and_resolve)
    assert plan.chosen.spec.name == single == other.chosen.spec.name


def forecast_and_resolve() -> tuple[StepForecast, str]:
    """With one machine's figures for both: two measurements differ."""
    from dataclasses import replace
    from unittest.mock import patch

    model = models.model("wan")
    work = Workload(lengths=(("video", 900),), num_branches=1)
    plan = forecast_for(work)
    typical = replace(model, typical_lengths={"video": 900})
    with patch("engines.planner.auto.measure", lambda *_: plan.machine), closing(TorchEngine(typical)) as engine:
        return plan, engine.division.specs.of(2)[0].name
