"""What the cost model says of steps of any size, divided as was decided: for jobs whose steps were not measured yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engines.core.estimates import StepEstimates
from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.planner.cost_model import Workload, predict
from engines.planner.forecast import StepForecast

TOKENS = tuple(2**power for power in range(6, 19))
"""From the smallest picture to the longest clip; the cost model is smooth between two of them."""


def estimates_of(plans: Mapping[int, Sequence[StepForecast]], specs: TeamSpecs) -> StepEstimates:
    """Return what steps take if teams divide them by ``specs``; ``plans`` are by size of team, of one branch and more.

    Streams grow together, in the proportions of the step for which was decided.
    """
    by_size = {
        size: tuple(_times_s(plan, spec) for plan, spec in zip(several, specs.of(size), strict=False))
        for size, several in plans.items()
    }
    return StepEstimates(tokens=TOKENS, by_size=by_size)


def _times_s(plan: StepForecast, spec: ParallelSpec) -> tuple[float, ...]:
    works = [_of_tokens(plan.work, num_tokens) for num_tokens in TOKENS]
    return tuple(predict(plan.counted, work, spec, plan.machine, plan.precision).total_ms / 1e3 for work in works)


def _of_tokens(work: Workload, num_tokens: int) -> Workload:
    share = num_tokens / sum(length for _, length in work.lengths)
    return replace(work, lengths=tuple((stream, max(1, round(share * length))) for stream, length in work.lengths))
