"""A small denoiser that exchanges data at every step, so that a missing rank shows in its result.

The request asks for faults, and the engine raises them: the product needs no hooks for them.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import JobFailedError, RankContext
from engines.core.estimates import StepEstimates
from engines.core.model import Branch
from engines.core.resources import rank_resources
from engines.core.weight_memory import WeightMemory
from engines.gang.gang_config import BuildRank, RankParts
from engines.gang.jobs.job import Job

Fault = Literal["exit", "hang", "error", "value_error", "job_failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeRequest:
    """``fault`` strikes in the engine at ``fault_step``, on ``fault_rank`` or on all ranks.

    After each step every rank appends a line with its pid to the file ``trace``. No step goes on before the file
    ``gate`` exists; ``awaited(gate)`` exists once a step waits for it.
    """

    seed: int
    num_steps: int
    step_s: float = 0.0
    fault: Fault | None = None
    fault_step: int = 1
    fault_rank: int | None = None
    trace: str | None = None
    gate: str | None = None
    bad_begin: bool = False
    bad_preview: bool = False
    addition: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeState:
    request: FakeRequest
    x_L: Tensor
    conditioning_L: Tensor
    step: int = 0


def predict_whole(x_L: Tensor, conditioning_L: Tensor) -> Tensor:
    """Compute what the engine computes in slices."""
    return torch.sin(3 * x_L) + conditioning_L


class FakeSampler:
    def begin(self, request: FakeRequest, conditioning: Tensor) -> FakeState:
        if request.bad_begin:
            raise ValueError("this request has no beginning")
        generator = torch.Generator().manual_seed(request.seed)
        x_L = torch.randn(conditioning.shape, generator=generator)
        return FakeState(request=request, x_L=x_L, conditioning_L=conditioning)

    def num_steps(self, state: FakeState) -> int:
        return state.request.num_steps

    def branches(self, state: FakeState) -> tuple[Branch, ...]:
        time.sleep(state.request.step_s)
        wait_for_file(state.request.gate)
        struck = state.request.fault if state.step + 1 == state.request.fault_step else None
        module = f"{struck}@{state.request.fault_rank}" if struck else "transformer"
        return (Branch(inputs={"x_L": state.x_L, "conditioning_L": state.conditioning_L}, module=module),)

    def advance(self, state: FakeState, predictions: tuple[Tensor, ...]) -> FakeState:
        if state.request.trace:
            with open(state.request.trace, "a") as trace:
                trace.write(f"{os.getpid()}\n")
        return replace(state, x_L=state.x_L - 0.1 * predictions[0], step=state.step + 1)

    def latents(self, state: FakeState) -> Tensor:
        return state.x_L

    def preview(self, state: FakeState) -> Tensor:
        if state.request.bad_preview:
            raise ValueError("this request has no preview")
        return state.x_L.clone()


class FakeEngine:
    """Each rank of a team computes its slice of the prediction; the sum over the team is the whole, to the bit.

    A team size and prediction length are warm once they have run.
    """

    estimates = None

    def __init__(self, context: RankContext) -> None:
        self._weight = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self._weight.weight.fill_(1.0)
        memory = rank_resources().get(WeightMemory)
        memory.open(context.device, Path(tempfile.gettempdir()))
        memory.hold(self._weight)
        self._rank = context.rank
        self._team_sizes = tuple(w for w in range(1, context.num_ranks + 1) if context.num_ranks % w == 0)
        self._seen: set[tuple[int, int]] = set()
        self._was_warm = False
        self._groups = {}
        for num_ranks in self._team_sizes[1:]:
            for first in range(0, context.num_ranks, num_ranks):
                team = tuple(range(first, first + num_ranks))
                self._groups[team] = dist.new_group(list(team))

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        keys = {(len(ranks), len(branch.inputs["x_L"])) for branch in branches}
        self._was_warm = keys <= self._seen
        self._seen |= keys
        return tuple(self._predict_branch(branch, ranks) for branch in branches)

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        self.predict(branches, ranks)

    @property
    def was_warm(self) -> bool:
        return self._was_warm

    @property
    def team_sizes(self) -> tuple[int, ...]:
        return self._team_sizes

    def close(self) -> None:
        assert dist.is_initialized()

    def _predict_branch(self, branch: Branch, ranks: tuple[int, ...]) -> Tensor:
        fault, _, fault_rank = branch.module.partition("@")
        if fault_rank in (str(self._rank), "None"):
            strike(fault)
        x_L, conditioning_L = branch.inputs["x_L"], branch.inputs["conditioning_L"]
        mine = torch.arange(len(x_L)) % len(ranks) == ranks.index(self._rank)
        whole_L = predict_whole(x_L, conditioning_L) * self._weight.weight[0, 0]  # asleep, it has no memory to read
        out_L = torch.where(mine, whole_L, torch.zeros_like(x_L))
        if len(ranks) > 1:
            dist.all_reduce(out_L, group=self._groups[ranks])
        return out_L


class FakeAdditions:
    """Loads any source, except that rank 1 refuses those that start with "bad"."""

    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank
        self.loaded: set[str] = set()

    def for_request(self, request: FakeRequest) -> object:
        return self.load(request.addition)

    def load(self, source: str) -> int:
        if self._rank == 1 and source.startswith("bad"):
            raise ValueError(f"{source} is no addition")
        self.loaded.add(source)
        return len(source) + self._rank

    def remove(self, source: str) -> None:
        self.loaded.remove(source)


def wait_for_file(path: str | None) -> None:
    if path is not None:
        awaited(path).touch()
        while not os.path.exists(path):
            time.sleep(0.005)


def awaited(path: str | Path) -> Path:
    """Return the path of the file that ``wait_for_file`` makes."""
    return Path(f"{path}.awaited")


def strike(fault: str) -> None:
    if fault == "exit":
        os._exit(1)
    if fault == "hang":
        time.sleep(10**6)
    if fault == "error":
        raise RuntimeError("the engine is broken")
    if fault == "job_failed":
        raise JobFailedError("the forward cannot be computed")
    if fault == "value_error":
        raise ValueError("the engine cannot take this shape")


FAKE_ESTIMATES = StepEstimates(tokens=(1, 100), by_size={1: ((0.001, 0.1),)})


def load_fake(context: RankContext) -> BuildRank:
    parts: dict[str, Any] = {"sampler": FakeSampler(), "estimates": FAKE_ESTIMATES, "additions": FakeAdditions(context)}
    return lambda: RankParts(engine=FakeEngine(context), **parts)


def load_fake_failing_on_rank_1(context: RankContext) -> BuildRank:
    if context.rank == 1:
        raise ValueError("no such checkpoint")
    dist.barrier()  # blocks for ever: rank 1 never arrives
    return load_fake(context)


CONDITIONING_L = torch.linspace(-1, 1, 101)


def fake_job(job_id: str, request: FakeRequest, **fields: Any) -> Job:
    usual: dict[str, Any] = {
        "job_id": job_id,
        "request": request,
        "conditioning": CONDITIONING_L,
        "num_steps": request.num_steps,
    }
    return Job(**(usual | fields))


def reference_latents(request: FakeRequest, conditioning_L: Tensor = CONDITIONING_L) -> Tensor:
    """Compute the same in one process, without engine, team or plan."""
    x_L = torch.randn(conditioning_L.shape, generator=torch.Generator().manual_seed(request.seed))
    for _ in range(request.num_steps):
        x_L = x_L - 0.1 * predict_whole(x_L, conditioning_L)
    return x_L
