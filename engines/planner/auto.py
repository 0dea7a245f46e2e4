"""Strategy "auto" by prediction, on this machine as measured at start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from engines.core.model import DenoiserModel
from engines.core.spec import ParallelSpec, tiling_sizes
from engines.parallel.division import TeamSpecs
from engines.parallel.mesh import Groups, Teams
from engines.planner.cost_model import Workload
from engines.planner.forecast import StepForecast, forecast
from engines.planner.measure import measure
from engines.planner.profile import profile

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = {"cpu": 256, "cuda": 4096}
"""Length of the longest stream to choose for if the model has no typical lengths: a small picture on CPUs, 1024 x
1024 pixels on GPUs."""

UNLIMITED = 2**63


def choose_specs(model: DenoiserModel, *, num_ranks: int, **options: Any) -> TeamSpecs:
    """Return the divisions of one branch, and of two, that ``forecasts``, with ``options``, predicts to be fastest."""
    if num_ranks == 1:
        return TeamSpecs(by_size={1: (ParallelSpec(), ParallelSpec())})
    return as_predicted(forecasts(model, num_ranks=num_ranks, **options))


def as_predicted(plans: Mapping[int, tuple[StepForecast, ...]]) -> TeamSpecs:
    """Return the chosen divisions of ``plans``."""
    return TeamSpecs(by_size={size: tuple(plan.chosen.spec for plan in several) for size, several in plans.items()})


def forecasts(
    model: DenoiserModel,
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    groups: Groups,
    precision: str,
    attention: str = "auto",
    num_branches: int = 2,
    originals_on_host: bool = False,
) -> dict[int, tuple[StepForecast, ...]]:
    """Return the costs of dividing 1 to ``num_branches`` branches, by team size. All ranks make the call.

    All get the same answer, which matches ``forecast`` for this machine and step. Figures and table are logged.
    ``originals_on_host``: loaded values of weights that additions change need no room on the device.
    """
    counted = profile(model).without_originals if originals_on_host else profile(model)
    lines = [ParallelSpec(ulysses=team_size) for team_size in tiling_sizes(num_ranks)]
    machine = measure(counted, Teams(rank=rank, num_ranks=num_ranks, specs=lines, groups=groups), device, attention)
    lengths = lengths_of_choice(model, device)
    if rank == 0:
        logger.info("this machine:\n%s", machine.describe(), extra={"machine": machine.to_json()})
    by_size: dict[int, tuple[StepForecast, ...]] = {}
    for team_size in possible_team_sizes(model, num_ranks):
        # Only the whole gang's teams must fit in memory: smaller teams serve smaller steps.
        local = machine if team_size == num_ranks else replace(machine, memory_bytes=UNLIMITED)
        one, *several = (Workload(lengths=lengths, num_branches=number) for number in range(1, num_branches + 1))
        single = forecast(counted, one, team_size, local, precision)
        others = (forecast(counted, n, team_size, local, precision, same_weights=single.chosen.spec) for n in several)
        plans = (single, *others)
        for plan in plans if rank == 0 else ():
            logger.info("auto strategy for a step of %s:\n%s", dict(lengths), plan.table(), extra=plan.log_fields)
        by_size[team_size] = plans
    return by_size


def possible_team_sizes(model: DenoiserModel, num_ranks: int) -> tuple[int, ...]:
    """Return the team sizes that tile the gang; the gang's size alone if ranks read only their share of the weights."""
    return tiling_sizes(num_ranks) if model.weights is None else (num_ranks,)


def lengths_of_choice(model: DenoiserModel, device: torch.device) -> tuple[tuple[str, int], ...]:
    """Return the tokens of the step that a choice is made for."""
    return typical_lengths(model, TYPICAL_TOKENS.get(device.type, 4096))


def typical_lengths(model: DenoiserModel, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """Return the model's typical lengths, or the probe's streams scaled until the longest has ``num_tokens``."""
    if model.typical_lengths is not None:
        return tuple((stream, model.typical_lengths[stream]) for stream in model.plan.streams)
    lengths: Mapping[str, int] = model.stream_lengths(model.probe()[0].arguments)
    longest = max(lengths.values())
    return tuple((stream, max(1, lengths[stream] * num_tokens // longest)) for stream in model.plan.streams)
