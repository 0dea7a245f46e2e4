"""Steps of FLUX.1-dev, one for each case: made ready, compared with the module's own answer, and timed."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.models import flux
from benchmarks.peers import capture
from benchmarks.peers.step import peer_step
from benchmarks.step_program import relative_error
from benchmarks.timing import Times, measure
from engines.core.layout import TokenLayout
from engines.core.model import LATENTS, Branch, FastWeights, Precision, StepTensors
from engines.core.spec import ParallelSpec
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.mesh import Groups, Team, Teams, team_of_one
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache
from pipelines.models.flux.fast import FluxWeights
from pipelines.models.flux.spec import SHARD_PLAN, SPEC

SMALL_SIDE = 128
MAX_ERROR, MAX_FP8_ERROR = 0.05, 0.15
STRATEGIES = ("ulysses", "allgather_kv", "ring", "hybrid")
Step = Callable[[], Any]


class Bench:
    """One model with its arranged weights and all teams. Cases run one after the other."""

    def __init__(self, *, rank: int, world: int, small: bool) -> None:
        self.rank, self.world, self.small = rank, world, small
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.pool = GraphPool(self.device) if on_gpu else None
        self.weights = cache(self._weights)
        self.inputs = cache(self._inputs)
        self.reference = cache(self._reference)

    @cached_property
    def module(self) -> Any:
        return flux.build(self.device, self.dtype, small=self.small)

    @torch.no_grad()
    def run(self, case: Case) -> tuple[Times, dict[str, Any]]:
        """Return the times of ``case``, and what else there is to say of it."""
        case = self.fitting(case)
        start_s = time.perf_counter()
        step, close = self.prepare(case)
        error = self.error(case, step())
        prepare_s = round(time.perf_counter() - start_s, 2)
        times = measure(step, repeats=case.repeats, warm_up=min(3, case.repeats - 1), num_ranks=case.num_ranks)
        close()
        gc.collect()
        of_capture = {"capture_error": step.error} if isinstance(step, capture.CapturedPeer) else {}
        return times, {"prepare_s": prepare_s, "relative_error": error, **of_capture}

    def fitting(self, case: Case) -> Case:
        """Return the case, or for a CPU a small one like it."""
        if not self.small:
            return case
        graph = case.graph and case.is_peer  # which says that a CPU has none
        return dataclasses.replace(case, side=min(case.side, SMALL_SIDE), graph=graph, repeats=3)

    def prepare(self, case: Case) -> tuple[Step, Callable[[], None]]:
        """Return a step and what ends it."""
        if case.maker == "fast":
            return self._fast(case)
        inputs = self.inputs(case.side, case.batch)
        if case.is_peer:
            self.references_for_peers()
            peer = peer_step(self.module, inputs, case.maker, case.precision)
            if not case.graph:
                return peer, lambda: None
            step_of_peer = capture.captured(peer)
            return step_of_peer, step_of_peer.close
        if case.maker == "blocks":
            self.references_for_peers()  # another case of this process may be of another side
            self.reference(case.side, case.batch)
            self.module.compile_repeated_blocks(dynamic=False, fullgraph=True)
        step = self._module_step(inputs)
        if case.graph and self.pool:
            captured = CapturedStep(lambda _: step(), {}, self.pool)
            return (lambda: captured(captured.inputs)), lambda: None
        return torch.inference_mode()(step), lambda: None

    def _module_step(self, inputs: dict[str, Tensor]) -> Step:
        self.module.set_attention_backend("_native_cudnn" if self.pool else "native")
        return lambda: self.module(**inputs, return_dict=False)[0]

    def _fast(self, case: Case) -> tuple[Step, Callable[[], None]]:
        inputs = self.inputs(case.side, case.batch)
        team = self._team(case)
        layout = TokenLayout.of(SHARD_PLAN.streams, SPEC.stream_lengths({}, inputs), team.context.size)
        weights = self.weights(case.precision)
        fast = FastStep(weights, team, layout, latents=inputs[LATENTS], peer_memory=case.peer_memory)
        hoisted: StepTensors = HoistedCache().step_tensors(Branch(inputs=inputs), weights, fast)
        latents = fast.tokens(inputs[LATENTS])
        if not (case.graph and self.pool):
            return (lambda: fast(latents, hoisted)), lambda: None
        named = {"latents": latents, **hoisted}
        captured = CapturedStep(lambda tensors: fast(tensors["latents"], tensors), named, self.pool)
        return (lambda: captured(captured.inputs)), captured.close

    def _team(self, case: Case) -> Team:
        if case.num_ranks == 1:
            return team_of_one(self.rank)
        first = self.rank // case.num_ranks * case.num_ranks
        ranks = tuple(range(first, first + case.num_ranks))
        return self.teams.team(ranks, ParallelSpec.of(case.strategy, case.num_ranks))

    @cached_property
    def teams(self) -> Teams:
        team_sizes = [num_ranks for num_ranks in (2, 4, 8) if num_ranks <= self.world]
        specs = {ParallelSpec.of(strategy, num_ranks) for strategy in STRATEGIES for num_ranks in team_sizes}
        return Teams(rank=self.rank, num_ranks=self.world, specs=specs, groups=Groups(self.world))

    def _weights(self, precision: Precision) -> FastWeights:
        return FluxWeights(self.module, precision)

    def _inputs(self, side: int, batch: int) -> dict[str, Tensor]:
        return flux.inputs(self.module, side, batch=batch, text=64 if self.small else flux.TEXT_TOKENS)

    def _reference(self, side: int, batch: int) -> Tensor:
        """Return the module's own answer, computed once before its parts are replaced."""
        with torch.no_grad():
            answer: Tensor = self._module_step(self.inputs(side, batch))()
        return answer.float()

    def references_for_peers(self) -> None:
        """Compute them all before the first peer changes the module for good."""
        for side in sorted({case.side for case in CASES if case.is_peer}):
            self.reference(min(side, SMALL_SIDE) if self.small else side, 1)

    def error(self, case: Case, answer: Tensor) -> float:
        """Return the error relative to the module's own answer. AssertionError if it is too large."""
        allowed = MAX_FP8_ERROR if case.precision == "fp8" else MAX_ERROR
        return relative_error(answer.float(), self.reference(case.side, case.batch), allowed)
