"""The engine that runs a family's PyTorch module on one rank or any team of a gang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.engine import EngineChoice
from engines.core.estimates import StepEstimates
from engines.core.model import Branch, DenoiserModel, FastWeights, dtype_of
from engines.core.resources import LRUCache
from engines.core.shard_plan import ShardPlan
from engines.core.spec import ParallelSpec, scheme_of
from engines.parallel.division import Division, TeamSpecs, exchange_predictions, forward_fails_alone, shape_of
from engines.parallel.early_start import gang_groups
from engines.parallel.mesh import Team
from engines.parallel.offload import offloaded_weights
from engines.parallel.sharded import ShardedModel
from engines.quantization.calibration import load_calibration
from engines.quantization.linear import move_from_host, swap_linears
from engines.torch_engine.compiler import compile_blocks, release_blocks
from engines.torch_engine.config import divide, memory_floor, resolve
from engines.torch_engine.exchange.choose import ExchangeRules, kernel_by_length
from engines.torch_engine.options import TorchOptions, check
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE, StepRunner


def predict_pipelined(sharded: ShardedModel, work: Iterable[tuple[Branch, Team]]) -> tuple[Tensor, ...]:
    """Return the predictions of the caller's forwards (with guidance: of all parts of the team's).

    All forwards start before any prediction is exchanged, so that a stage overlaps with its neighbours. With n forwards
    on s stages, s - 1 of n + s - 1 turns are idle.
    """
    started = [(branch, team, _start(sharded, branch, team)) for branch, team in work]
    predictions: list[Tensor] = []
    for branch, team, prediction in started:
        predictions.extend(exchange_predictions(sharded.finish(prediction, branch, team), team.guidance))
    return tuple(predictions)


def _start(sharded: ShardedModel, branch: Branch, team: Team) -> Tensor:
    sharded.set_additions(branch, team)
    return sharded.forward(branch, team)


MAX_SEEN_SHAPES = 1024
"""Remembered shapes that fit in memory, or have run."""


class TorchEngine:
    """An ``Engine``, made on every rank at the same time, after ``torch.distributed`` is initialised (if needed).

    ``strategy`` is "auto" (by prediction), a name for ``ParallelSpec.of``, or the divisions themselves. ``others`` are
    further divisions for ``division.use``. The parameters after ``options`` are for tests and comparisons; by default
    the device decides (``config.resolve``). ``fast_weights`` are those of an engine on the same modules, which it may
    have replaced. Raise ``ValueError`` if the engine or the model does not support the choice.
    """

    estimates: StepEstimates | None = None
    """See ``Engine.estimates``; set if they were computed to decide the division."""

    def __init__(
        self,
        model: DenoiserModel,
        *,
        strategy: str | TeamSpecs = "auto",
        others: Iterable[ParallelSpec] = (),
        precision: str = "auto",
        attention: str = "auto",
        options: TorchOptions | None = None,
        compiled: bool | None = None,
        fast: bool | None = None,
        capture: bool = True,
        fast_weights: Mapping[str, FastWeights] | None = None,
    ) -> None:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        options = options or TorchOptions()
        choice: dict[str, Any] = {"strategy": _name(strategy), "precision": precision, "attention": attention}
        check(EngineChoice(**choice, options=options, num_ranks=num_ranks, switches=model.switches))
        module = next(iter(model.modules.values()))
        self.device, self.dtype = model.device, dtype_of(module)
        how: dict[str, Any] = {"compiled": compiled, "fast": fast, "capture": capture}
        self.config = resolve(model, self.device, precision=precision, attention=attention, options=options, **how)
        gang: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "groups": gang_groups()}
        how = {"precision": self.config.precision, "originals_on_host": self.config.originals_on_host}
        specs = divide(model, strategy, device=self.device, attention=attention, **how, **gang)
        self.division = Division(specs, model.plan, others=others, **gang)
        self._model = model
        self._memory = memory_floor(model, self.config.precision, self.config.offloaded_blocks)
        self._fitting_shapes, self._run_shapes = (LRUCache[None](MAX_SEEN_SHAPES) for _ in range(2))
        self._was_warm, self._sharded = False, self._make_sharded(attention)
        self._steps = StepRunner(model, self._sharded, config=self.config, device=self.device, weights=fast_weights)
        if self._quantises and model.weights is None:
            self._quantise_weights()

    @property
    def _quantises(self) -> bool:
        return self.config.precision != "native"

    def _make_sharded(self, attention: str) -> ShardedModel:
        return ShardedModel(
            self._model,
            self._prepare_module,
            make_kernel=kernel_by_length(self.config.exchange, self.device, self.dtype),
            quantises=self._quantises,
            attention=attention,
            num_offloaded=self.config.offloaded_blocks,
            originals_on_host=self.config.originals_on_host,
        )

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.predict``. Neighbouring branches of equal shape may run at the same time (guidance).

        Raise ``ValueError`` for a step that certainly does not fit in memory, and ``JobFailedError`` for one that the
        module cannot compute: both on all ranks and before any exchange.
        """
        self._check_memory(branches, ranks)
        with forward_fails_alone():
            return self._predict(branches, ranks)

    def _predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        if self.division.team(ranks).pipeline.size > 1:
            shapes = (ranks, *map(shape_of, branches))
            self._was_warm = shapes in self._run_shapes
            self._run_shapes.get(shapes, lambda: None)
            return predict_pipelined(self._sharded, self.division.forwards(branches, ranks))
        self._was_warm = True
        return self.division.predict(branches, ranks, self._run)

    def close(self) -> None:
        """Release graphs, modules and compiled code, in this order. Process groups end with the communicator."""
        self._steps.close()
        self._sharded.close()
        for module in self._model.modules.values():
            release_blocks(module, self._model.plan)

    @property
    def fast_weights(self) -> Mapping[str, FastWeights]:
        """Weights of hand-ordered steps by module, as far as they are arranged."""
        return self._steps.arranged

    @property
    def was_warm(self) -> bool:
        """See ``Engine.was_warm``: all steps were replays or, without capture, had shapes that had run."""
        return self._was_warm

    @property
    def num_captured(self) -> int:
        """Steps of this rank that are replays now."""
        return self._steps.num_captured

    @property
    def team_sizes(self) -> tuple[int, ...]:
        return self.division.team_sizes

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Compile and capture for the shapes of ``branches``. Every rank of ``ranks`` makes the call."""
        for _ in range(RUNS_BEFORE_CAPTURE + 1 if self._may_capture(branches, ranks) else 1):
            self.predict(branches, ranks)

    def _may_capture(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> bool:
        """Return whether any of ``ranks`` captures any of ``branches``: parts of a team make equally many runs."""
        if self.division.team(ranks).pipeline.size > 1:
            return False
        groups = self.division.groups(branches, ranks)
        return any(self._steps.allows_capture(branch, team) for together, team in groups for branch in together)

    def release_steps(self) -> None:
        """Release captures and the caches of steps, but not weights. All shapes are new afterwards."""
        self._steps.release()
        self._run_shapes.clear()
        self._fitting_shapes.clear()

    def use(self, rules: ExchangeRules) -> None:
        """Exchange heads by ``rules`` from now on, with all shapes new. All ranks call between the same two steps."""
        self.config = replace(self.config, exchange=rules)
        self.release_steps()
        self._steps.rules = rules
        self._sharded.use(kernel_by_length(rules, self.device, self.dtype))

    def load_weights(self) -> None:
        """Make all modules of the whole gang's team now. With weights in files, this reads the caller's share."""
        for name in self._model.modules:
            self._sharded.module(name, self.division.team(tuple(range(self.team_sizes[-1]))))

    def _check_memory(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        for branch in branches:
            self._fitting_shapes.get((len(ranks), shape_of(branch)), partial(self._check_one, branch, ranks))

    def _check_one(self, branch: Branch, ranks: tuple[int, ...]) -> None:
        num_tokens = sum(self._model.stream_lengths(branch.arguments).values())
        self._memory.check(num_tokens, self.division.team(ranks).spec)

    def _quantise_weights(self) -> None:
        """Quantise the weights of all teams. Layers are split as loaded, before those of the module are replaced.

        Pipelines share the replaced layers, unless a hand-ordered step left them or additions change them.
        """
        needs_loaded = self.config.fast or self._model.switches

        def place(team: Team) -> int:
            if team.pipeline.size > 1 and team.tensor.size == 1:
                return 1 if needs_loaded else 3
            return 0 if team.tensor.size > 1 else 2

        for team in sorted(self.division.teams.all(), key=place):
            for name in self._model.modules:
                if self._steps.is_fast(team):
                    self._steps.weights(name)
                else:
                    self._sharded.module(name, team)

    def _run(self, branch: Branch, team: Team) -> Tensor:
        self._sharded.set_additions(branch, team, self._steps.quantised_weights(branch.module, team))
        prediction = self._steps.run(branch, team)
        self._was_warm = self._was_warm and self._steps.was_warm
        return prediction

    def _prepare_module(self, name: str, module: nn.Module, plan: ShardPlan) -> None:
        """Quantise the layers and compile the blocks of a module without a fast path."""
        if scheme := scheme_of(self.config.precision):
            path, num_offloaded = self.config.calibration, self.config.offloaded_blocks
            amax = None if path is None else load_calibration(Path(path), name)
            stay = offloaded_weights(module, plan, num_offloaded) if num_offloaded else frozenset()
            with self.device:
                swap_linears(module, plan, scheme, amax, on_host=stay)
            move_from_host((x for own, x in module.named_parameters() if own not in stay), self.device)
        if self.config.compile_blocks:
            compile_blocks(module, plan, dynamic=self._model.dynamic_shapes)


def _name(strategy: str | TeamSpecs) -> str:
    """Return the strategy's configured name: decided divisions come from "auto"."""
    return strategy if isinstance(strategy, str) else "auto"
