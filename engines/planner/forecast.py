"""Forecast of a step: the candidates and the reason for the choice, as records and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.core.estimates import StepEstimates
from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.planner.cost_model import USABLE, Cost, Workload, candidates, choose, predict
from engines.planner.machine import Machine
from engines.planner.profile import ModelProfile

TRIAL_MARGIN, MAX_TRIALS = 0.15, 3
"""A candidate within this fraction of the best is timed too, up to this many candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """Predicted costs of every way to divide a step."""

    counted: ModelProfile
    """The model's costs."""
    machine: Machine
    """Speeds of devices and exchanges."""
    work: Workload
    """The step."""
    precision: str
    """Precision of the linears: "native", or a quantised one."""
    costs: tuple[Cost, ...]
    """Costs of every candidate, fastest first."""
    chosen: Cost
    """The fastest that fits the memory."""

    def reason(self) -> str:
        """Return the reason for the choice, in a sentence."""
        name, fastest = self.chosen.spec.name, self.costs[0]
        if not self._fits(self.chosen):
            return f"{name}: the smallest of {len(self.costs)}, none of which fits"
        if self.chosen is fastest:
            return f"{name}: the fastest of {len(self.costs)}"
        if not self._fits(fastest):
            usable = f"{USABLE:.0%} of {self.machine.memory_bytes / 2**30:.1f} GiB"
            return f"{name}: the fastest that fits {usable}"
        gap = f"{self.chosen.total_ms / fastest.total_ms - 1:.1%} slower than {fastest.spec.name}"
        if fastest.spec.divides_weights and not self.chosen.spec.divides_weights:
            return f"{name}: {gap}, and every rank holds whole weights, so that teams of any size can form"
        return f"{name}: {gap}, and simpler or smaller"

    def shortlist(self) -> tuple[ParallelSpec, ...]:
        """Return the candidates to time: the chosen one, then near-equals with whole weights unless it divides them."""
        if self.chosen.spec.divides_weights:
            return (self.chosen.spec,)
        fitting = [cost for cost in self.costs if not cost.spec.divides_weights and self._fits(cost)]
        limit_ms = (1 + TRIAL_MARGIN) * fitting[0].total_ms
        near = [cost.spec for cost in fitting if cost.total_ms <= limit_ms and cost is not self.chosen]
        return (self.chosen.spec, *near)[:MAX_TRIALS]

    def _fits(self, cost: Cost) -> bool:
        return cost.needed_bytes <= USABLE * self.machine.memory_bytes

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields for a log line's ``extra``."""
        fields = {
            "num_ranks": self.chosen.spec.num_ranks,
            "branches": self.work.num_branches,
            "precision": self.precision,
        }
        return fields | {"strategy": self.chosen.spec.name, "predicted_ms": round(self.chosen.total_ms, 2)}

    def table(self) -> str:
        """Return one line per candidate: milliseconds of a step by kind of work, and GiB per rank."""
        rows: list[tuple[str, ...]] = [("strategy", "ms", "products", "attention", "other", "exchange", "GiB")]
        for cost in self.costs:
            mark = " *" if cost is self.chosen else ""
            parts_ms = (cost.products_ms, cost.attention_ms, cost.elementwise_ms, cost.exchange_ms)
            numbers = (cost.total_ms, *parts_ms, cost.memory_bytes / 2**30)
            rows.append((cost.spec.name + mark, *(f"{number:.2f}" for number in numbers)))
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        cells = ([name.ljust(first), *map(str.rjust, numbers, widths)] for name, *numbers in rows)
        lines = [" ".join(row) for row in cells]
        return "\n".join([*lines, f"* {self.reason()} (on {self.machine.name})"])


def forecast(
    counted: ModelProfile,
    work: Workload,
    num_ranks: int,
    machine: Machine,
    precision: str = "native",
    *,
    same_weights: ParallelSpec | None = None,
    must_fit: bool = True,
) -> StepForecast:
    """Cost every way to divide the step over ``num_ranks`` ranks and choose one. Loads and runs nothing.

    ``same_weights`` restricts candidates to those with the same weights on each rank. ValueError if nothing fits the
    machine's memory; without ``must_fit`` the smallest is chosen then.
    """
    specs = candidates(counted, num_ranks, work.num_branches)
    if same_weights is not None:
        degrees = (same_weights.tensor, same_weights.pipeline)
        specs = [spec for spec in specs if (spec.tensor, spec.pipeline) == degrees]
    costs = [predict(counted, work, spec, machine, precision) for spec in specs]
    smallest = min(costs, key=lambda cost: cost.needed_bytes)
    is_hopeless = not must_fit and smallest.needed_bytes > USABLE * machine.memory_bytes
    return StepForecast(
        counted=counted,
        machine=machine,
        work=work,
        precision=precision,
        costs=tuple(sorted(costs, key=lambda cost: cost.total_ms)),
        chosen=smallest if is_hopeless else choose(costs, machine.memory_bytes),
    )


def workload(model: DenoiserModel, branches: tuple[Branch, ...]) -> Workload:
    """Return the step made of ``branches`` of one job."""
    lengths = model.stream_lengths(branches[0].arguments)
    ordered = tuple((stream, lengths[stream]) for stream in model.plan.streams)
    return Workload(lengths=ordered, num_branches=len(branches))


TOKENS = tuple(2**power for power in range(6, 19))
"""Numbers from the smallest picture to the longest clip; the cost model is smooth in between."""


def estimates_of(plans: Mapping[int, Sequence[StepForecast]], specs: TeamSpecs) -> StepEstimates:
    """Return step times if teams divide steps by ``specs``; ``plans`` are by team size, for one branch and more.

    Streams grow together, in the proportions of the forecast step.
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
