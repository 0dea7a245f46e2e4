"""The benchmark runs what it predicts, and says whether the orders agree."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planner.forecast import predicted, report, shortest_ms
from engines.planner.forecast import StepForecast
from tests.engines.support import models
from tests.engines.support.gloo import gang

STRATEGIES = ("ulysses2", "guidance2")


def predict_and_run() -> tuple[StepForecast, dict[str, float]]:
    model, branches = models.model("wan"), models.branches("wan", "even", num=2)
    return predicted(model, branches, torch.device("cpu")), shortest_ms(model, branches, STRATEGIES, 1)


@pytest.fixture(scope="module")
def outcome() -> tuple[StepForecast, dict[str, float]]:
    plan, ran_ms = gang(2).run(predict_and_run)[0]
    return plan, ran_ms


def test_what_was_asked_for_has_run(outcome: tuple[StepForecast, dict[str, float]]) -> None:
    plan, ran_ms = outcome
    assert set(STRATEGIES) == set(ran_ms) <= {cost.spec.name for cost in plan.costs}
    assert all(0 < milliseconds < float("inf") for milliseconds in ran_ms.values())


@pytest.mark.parametrize("agree", [True, False])
def test_orders_are_compared(outcome: tuple[StepForecast, dict[str, float]], agree: bool) -> None:
    plan, _ = outcome
    order = [cost.spec.name for cost in plan.costs][: 2 if agree else None : 1 if agree else -1]
    document = report(plan, {name: float(place) for place, name in enumerate(order)})
    assert document["same_order"] is agree
