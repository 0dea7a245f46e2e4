"""Makes each case's step ready, checks its answer and times it."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.denoise_step import elastic
from benchmarks.denoise_step.cases import CASES, ENGINE_MAKERS, Case
from benchmarks.models import flux, wan
from benchmarks.models.flux_denoiser import as_denoiser
from benchmarks.peers.step import peer_step
from benchmarks.timing import Times, measure
from engines.core.layout import TokenLayout
from engines.core.model import LATENTS, Branch, FastWeights, Precision, Schedule, StepTensors
from engines.core.spec import ParallelSpec, aligned_runs
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.collectives import Axis
from engines.parallel.mesh import Groups, Team, Teams, team_of_one
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache
from engines.torch_engine.options import TorchOptions
from pipelines.models.flux.fast import FluxWeights
from pipelines.models.flux.spec import SHARD_PLAN, SPEC

SMALL_SIDE = 128
STRATEGIES = ("ulysses", "allgather_kv", "ring", "hybrid")
Step = Callable[[], Any]


class Bench:
    """One model, its arranged weights, all teams; cases one after the other."""

    def __init__(self, *, rank: int, world: int, small: bool) -> None:
        self.rank, self.world, self.small = rank, world, small
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        self.device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.pool = GraphPool(self.device) if on_gpu else None
        self.weights = cache(self._weights)
        self.inputs = cache(self._inputs)
        self.reference = cache(self._reference)
        self.group = cache(self._group)
        self.engine = cache(self._engine)
        self.first_answers: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def module(self) -> Any:
        """FLUX.1-dev; not made for cases of another model."""
        return flux.build(self.device, self.dtype, small=self.small)

    @torch.no_grad()
    def run(self, case: Case) -> tuple[Times, dict[str, Any]]:
        """Its times, and what else there is to say of it."""
        case = self.fitting(case)
        start_s = time.perf_counter()
        step, close = self.prepare(case)
        error = self.error(case, step())
        prepare_s = round(time.perf_counter() - start_s, 2)
        times = measure(step, repeats=case.repeats, warm_up=min(3, case.repeats - 1), num_ranks=case.num_ranks)
        close()
        gc.collect()
        extra = {"prepare_s": prepare_s} | ({} if error is None else {"relative_error": error})
        if case.maker in ("always8", "elastic8"):
            extra["pictures_per_s"] = round(1000 * elastic.NUM_JOBS / times.median_ms, 2)
        return times, extra

    def fitting(self, case: Case) -> Case:
        """The case, or for a CPU a small one like it."""
        if not self.small:
            return case
        num_steps, num_blocks = min(case.num_steps, 3), min(case.num_blocks, 1)
        changes: dict[str, Any] = {"side": min(case.side, SMALL_SIDE) if case.maker != "wan" else case.side}
        changes |= {"graph": False, "repeats": 3, "num_steps": num_steps, "num_blocks": num_blocks}
        return dataclasses.replace(case, **changes)

    def prepare(self, case: Case) -> tuple[Step, Callable[[], None]]:
        if case.maker == "fast":
            return self._fast(case)
        if case.maker in ENGINE_MAKERS:
            return self._engine_step(case), lambda: None
        if case.maker == "wan":
            return self._wan(case), lambda: None
        inputs = self.inputs(case.side, case.batch)
        if case.is_peer:
            self.references_for_peers()
            return peer_step(self.module, inputs, case.maker, case.precision), lambda: None
        if case.maker == "blocks":
            self.references_for_peers()  # another case of this process may be of another side
            self.reference(case.side, case.batch)
            self.module.compile_repeated_blocks(dynamic=False, fullgraph=True)
        step = self._module_step(inputs)
        if case.graph and self.pool:
            return self._captured(lambda _: step(), {}), lambda: None
        return torch.inference_mode()(step), lambda: None

    def _engine_step(self, case: Case) -> Step:
        """As a gang calls it: a job's step with its schedule. "switch" goes to one rank and back with every repeat."""
        engine, inputs = self.engine(case.peer_memory), self.inputs(case.side, case.batch)
        first = self.rank // case.num_ranks * case.num_ranks
        together, alone = tuple(range(first, first + case.num_ranks)), (self.rank,)
        if case.maker in ("always8", "elastic8"):
            return elastic.pictures(
                engine, self.module, side=case.side, text=self.num_text, num_steps=case.num_steps, ranks=together,
                rank=self.rank, elastic=case.maker == "elastic8",
            )  # fmt: skip
        timesteps_S = torch.linspace(1, 0.1, 28, device=self.device).to(self.dtype)
        schedule = Schedule.of(timesteps_S, 14)
        branches = (Branch(inputs={**inputs, "timestep": timesteps_S[14:15]}, schedule=schedule),)
        teams: tuple[tuple[int, ...], ...] = (alone, together) if case.maker == "switch" else (together,)
        for ranks in dict.fromkeys(teams):
            engine.warm_up(branches, ranks)
        return lambda: [engine.predict(branches, ranks)[0] for ranks in teams][-1]

    def _engine(self, peer_memory: bool) -> TorchEngine:
        options = TorchOptions(peer_memory=peer_memory)
        return TorchEngine(as_denoiser(self.module), strategy="ulysses", options=options)

    def _wan(self, case: Case) -> Step:
        first = self.rank // case.num_ranks * case.num_ranks
        ranks = tuple(range(first, first + case.num_ranks))
        return wan.step(
            self.device, height=case.side, ranks=ranks, strategy=case.strategy, num_branches=case.num_branches,
            capture=case.graph, num_blocks=case.num_blocks or wan.LAYERS, small=self.small,
            peer_memory=case.peer_memory,
        )  # fmt: skip

    def _module_step(self, inputs: dict[str, Tensor]) -> Step:
        self.module.set_attention_backend("_native_cudnn" if self.pool else "native")
        return lambda: self.module(**inputs, return_dict=False)[0]

    def _fast(self, case: Case) -> tuple[Step, Callable[[], None]]:
        inputs = self.inputs(case.side, case.batch)
        team = self._team(case)
        layout = TokenLayout.of(SHARD_PLAN.streams, SPEC.stream_lengths({}, inputs), team.context.size)
        weights = self.weights(case.precision)
        fast = FastStep(weights, team, layout, latents=inputs[LATENTS], peer_memory=case.peer_memory)
        around = _without_exchange if case.exchange == "none" else nullcontext

        def run(latents: Tensor, hoisted: StepTensors) -> Tensor:
            with around():
                return fast(latents, hoisted)

        hoisted = HoistedCache().step_tensors(Branch(inputs=inputs), weights, fast)
        latents = fast.tokens(inputs[LATENTS])
        if not (case.graph and self.pool):
            return (lambda: run(latents, hoisted)), lambda: None
        named = {"latents": latents, **hoisted}
        captured = CapturedStep(lambda tensors: run(tensors["latents"], tensors), named, self.pool)
        return (lambda: captured(captured.inputs)), captured.close

    def _captured(self, function: Callable[[Any], Tensor], tensors: dict[str, Tensor]) -> Step:
        assert self.pool is not None
        captured = CapturedStep(function, tensors, self.pool)
        return lambda: captured(captured.inputs)

    def _team(self, case: Case) -> Team:
        if case.num_ranks == 1:
            return team_of_one(self.rank)
        if case.exchange == "none":
            return _pretended_team(ParallelSpec.of(case.strategy, case.num_ranks))
        first = self.rank // case.num_ranks * case.num_ranks
        ranks = tuple(range(first, first + case.num_ranks))
        team = self.teams.team(ranks, ParallelSpec.of(case.strategy, case.num_ranks))
        if not case.exchange.startswith("nccl-"):
            return team
        name = self.group(case.num_ranks, case.exchange.removeprefix("nccl-"))
        return dataclasses.replace(team, ulysses=dataclasses.replace(team.ulysses, group=name))

    @cached_property
    def teams(self) -> Teams:
        team_sizes = [num_ranks for num_ranks in (2, 4, 8) if num_ranks <= self.world]
        specs = {ParallelSpec.of(strategy, num_ranks) for strategy in STRATEGIES for num_ranks in team_sizes}
        return Teams(rank=self.rank, num_ranks=self.world, specs=specs, groups=Groups(self.world))

    def _group(self, num_ranks: int, kind: str) -> str:
        """A communicator for each run of ranks: on a stream of usual priority ("low"), or of few thread blocks."""
        mine = ""
        for ranks in aligned_runs(self.world, num_ranks):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind != "low")
            if kind != "low":
                options.config.max_ctas = int(kind)
            group: Any = dist.new_group(list(ranks), pg_options=options)
            mine = str(group.group_name) if self.rank in ranks else mine
        return mine

    def _weights(self, precision: Precision) -> FastWeights:
        return FluxWeights(self.module, precision)

    def _inputs(self, side: int, batch: int) -> dict[str, Tensor]:
        return flux.inputs(self.module, side, batch=batch, text=self.num_text)

    @property
    def num_text(self) -> int:
        return 64 if self.small else flux.TEXT_TOKENS

    def _reference(self, side: int, batch: int) -> Tensor:
        """The module's own answer, computed once before anything was swapped."""
        with torch.no_grad():
            answer: Tensor = self._module_step(self.inputs(side, batch))()
        return answer.float()

    def references_for_peers(self) -> None:
        """All of them, before the first peer changes the module for good."""
        for side in sorted({case.side for case in CASES if case.is_peer}):
            self.reference(min(side, SMALL_SIDE) if self.small else side, 1)

    def error(self, case: Case, answer: Any) -> float | None:
        """Relative to the module's own answer; for Wan, whose module takes minutes, to that of the first case."""
        if case.exchange == "none" or case.maker.startswith(ENGINE_MAKERS):
            return None
        if case.maker == "wan":
            answer = answer[0]
            reference = self.first_answers.setdefault((case.side, case.num_blocks), answer.float())
        else:
            reference = self.reference(case.side, case.batch)
        error = ((answer.float() - reference).norm() / reference.norm()).item()
        assert error < (0.15 if case.precision == "fp8" else 0.05), f"wrong answer: relative error {error:.3f}"
        return float(f"{error:.2e}")


def _without_exchange() -> AbstractContextManager[Any]:
    """Ranks keep what they have: a wrong answer in the right shapes."""
    stack = ExitStack()
    exchange = "engines.torch_engine.exchange.heads"
    stack.enter_context(patch.multiple(exchange, start_all_to_all=lambda x, axis: x, wait=lambda x: x))
    stacked = patch("engines.torch_engine.fast_step.all_gather", lambda x, axis: torch.stack([x] * axis.size))
    stack.enter_context(stacked)
    return stack


def _pretended_team(spec: ParallelSpec) -> Team:
    """Rank 0's view of a team whose other ranks are not there."""
    ranks = tuple(range(spec.num_ranks))
    alone, everyone = Axis(ranks=(0,), index=0), Axis(ranks=ranks, index=0)
    axes = dict.fromkeys(("guidance", "ring", "allgather_kv", "tensor"), alone)
    return Team(ranks=ranks, spec=spec, ulysses=everyone, context=everyone, **axes)
