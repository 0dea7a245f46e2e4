"""The candidates for a step and why one was chosen, as records and as a table for people."""

from __future__ import annotations

from dataclasses import dataclass

from engines.model import DenoiserModel
from engines.parallel.cost_model import Cost, Workload, candidates, choose, predict
from engines.parallel.machine import Machine
from engines.parallel.profile import profile


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """Predicted costs of every candidate, fastest first, and the chosen one."""

    machine: Machine
    work: Workload
    costs: tuple[Cost, ...]
    chosen: Cost

    def reason(self) -> str:
        """Why the chosen one was chosen, in a sentence."""
        fastest = self.costs[0]
        if self.chosen is fastest:
            return f"{self.chosen.spec.name}: the fastest of {len(self.costs)}"
        if fastest.memory_bytes > self.machine.memory_bytes:
            return f"{self.chosen.spec.name}: the fastest that fits {self.machine.memory_bytes / 2**30:.0f} GiB"
        gap = self.chosen.total_ms / fastest.total_ms - 1
        return f"{self.chosen.spec.name}: within {gap:.1%} of {fastest.spec.name} and simpler or smaller"

    def table(self) -> str:
        """One line per candidate: milliseconds of a step by where they go, and GiB per rank."""
        lines = [f"{'strategy':<28}{'ms':>9}{'products':>10}{'attention':>10}{'other':>9}{'exchange':>10}{'GiB':>8}"]
        for cost in self.costs:
            mark = " *" if cost is self.chosen else ""
            parts = (cost.products_ms, cost.attention_ms, cost.elementwise_ms, cost.exchange_ms)
            numbers = f"{cost.total_ms:>9.2f}{parts[0]:>10.2f}{parts[1]:>10.2f}{parts[2]:>9.2f}{parts[3]:>10.2f}"
            lines.append(f"{cost.spec.name + mark:<28}{numbers}{cost.memory_bytes / 2**30:>8.2f}")
        return "\n".join([*lines, f"* {self.reason()} (on {self.machine.name})"])


def forecast(model: DenoiserModel, work: Workload, width: int, machine: Machine) -> StepForecast:
    """Cost every way to divide the step over ``width`` ranks. Loads and runs nothing: the model may be on "meta"."""
    counted = profile(model)
    costs = [predict(counted, work, spec, machine) for spec in candidates(counted, width, work.num_branches)]
    chosen = choose(costs, machine.memory_bytes)
    return StepForecast(
        machine=machine, work=work, costs=tuple(sorted(costs, key=lambda cost: cost.total_ms)), chosen=chosen
    )
