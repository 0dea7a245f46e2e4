"""Eight pictures on one gang: all ranks on each, one after the other, or the ranks shared out among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import flux
from engines.core.model import Branch, ModelInputs, Schedule
from engines.torch_engine.engine import TorchEngine

NUM_JOBS = 8
Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One picture: what the model reads at every step, the timesteps, and the ranks that work on it."""

    inputs: ModelInputs
    timesteps_S: Tensor
    ranks: Ranks

    def paint(self, engine: TorchEngine) -> Tensor:
        """All steps by Euler's rule, as a rank of the job's team does them."""
        latents = self.inputs["hidden_states"]
        ends = [*self.timesteps_S.tolist()[1:], 0.0]
        for step, (start, end) in enumerate(zip(self.timesteps_S.tolist(), ends, strict=True)):
            inputs = {**self.inputs, "hidden_states": latents, "timestep": self.timesteps_S[step : step + 1]}
            schedule = Schedule.of(self.timesteps_S, step)
            (velocity,) = engine.predict((Branch(inputs=inputs, schedule=schedule),), self.ranks)
            latents = latents + (end - start) * velocity
        return latents


def pictures(
    engine: TorchEngine, module: Any, *, side: int, text: int, num_steps: int, ranks: Ranks, rank: int, elastic: bool
) -> Callable[[], list[Tensor]]:
    """Paints the pictures of ``rank``, one of ``ranks``.

    The teams' graphs are there already; what a job's first step computes is not.
    """
    size = engine.team_sizes[0] if elastic else len(ranks)
    teams = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    mine = [team for number in range(NUM_JOBS) if rank in (team := teams[number % len(teams)])]
    for team in dict.fromkeys(mine):
        branch = Branch(inputs=flux.inputs(module, side, text=text))
        engine.warm_up((branch,), team)

    def paint() -> list[Tensor]:
        return [new_job(module, side, text, num_steps, team).paint(engine) for team in mine]

    return paint


def new_job(module: Any, side: int, text: int, num_steps: int, ranks: Ranks) -> Job:
    """New tensors each time, as a new request has them: nothing hoisted for another serves it."""
    inputs = flux.inputs(module, side, text=text)
    some = inputs["hidden_states"]
    timesteps_S = torch.linspace(1, 1 / num_steps, num_steps, device=some.device).to(some.dtype)
    return Job(inputs=inputs, timesteps_S=timesteps_S, ranks=ranks)
