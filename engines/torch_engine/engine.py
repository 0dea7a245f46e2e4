"""The engine that runs a family's PyTorch module on one rank or any team of a gang."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.engine import EngineChoice
from engines.core.estimates import StepEstimates
from engines.core.model import Branch, DenoiserModel, dtype_of
from engines.core.resources import LRUCache
from engines.core.shard_plan import ShardPlan
from engines.core.spec import ParallelSpec, scheme_of
from engines.parallel.division import Division, TeamSpecs, exchange_predictions, forward_fails_alone, shape_of
from engines.parallel.early_start import gang_groups
from engines.parallel.mesh import Team
from engines.parallel.sharded import ShardedModel
from engines.quantization.calibration import load_calibration
from engines.quantization.linear import swap_linears
from engines.torch_engine.compiler import compile_blocks, release_blocks
from engines.torch_engine.config import divide, memory_floor, resolve
from engines.torch_engine.exchange.choose import ExchangeRules, kernel_by_length
from engines.torch_engine.options import TorchOptions, check
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE, StepRunner


def predict_pipelined(sharded: ShardedModel, work: Iterable[tuple[Branch, Team]]) -> tuple[Tensor, ...]:
    """Predictions of the caller's forwards (with guidance: of all parts of the team').

    All forwards are started before any prediction is passed round, so that a stage computes one while its neighbours
    compute others; with n forwards on s stages, s - 1 of n + s - 1 turns are idle.
    """
    started = [(branch, team, _start(sharded, branch, team)) for branch, team in work]
    predictions: list[Tensor] = []
    for branch, team, mine in started:
        predictions.extend(exchange_predictions(sharded.finish(mine, branch, team), team.guidance))
    return tuple(predictions)


def _start(sharded: ShardedModel, branch: Branch, team: Team) -> Tensor:
    sharded.set_additions(branch, team)
    return sharded.forward(branch, team)


MAX_KNOWN = 1024
"""Shapes of which is known that they fit, or ran."""


class TorchEngine:
    """An ``Engine``, made on every rank at the same time, after ``torch.distributed`` is initialised (alone: without).

    ``strategy`` is "auto" (by prediction), what ``ParallelSpec.of`` takes, or the very divisions; ``others`` are ready
    for ``division.use`` as well. What follows ``options`` is chosen by the device, and
    is there for tests and comparisons: see ``config.resolve``. Raises ``ValueError`` if the engine cannot do what is
    asked, or the model cannot be divided over the gang so.
    """

    estimates: StepEstimates | None = None
    """See ``Engine.estimates``: set where they were asked for to decide the division."""

    def __init__(
        self,
        model: DenoiserModel,
        *,
        strategy: str | TeamSpecs = "auto",
        others: Iterable[ParallelSpec] = (),
        precision: str = "auto",
        options: TorchOptions | None = None,
        compiled: bool | None = None,
        fast: bool | None = None,
        capture: bool = True,
    ) -> None:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        options = options or TorchOptions()
        asked: dict[str, Any] = {"strategy": _name(strategy), "precision": precision, "options": options}
        check(EngineChoice(**asked, num_ranks=num_ranks, switches=bool(model.additions)))
        some = next(iter(model.modules.values()))
        self.device, self.dtype = model.device, dtype_of(some)
        self.config = resolve(
            model,
            self.device,
            precision=precision,
            options=options,
            compiled=compiled,
            fast=fast,
            capture=capture,
        )
        gang: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "groups": gang_groups()}
        specs = divide(model, strategy, device=self.device, precision=self.config.precision, **gang)
        self.division = Division(specs, model.plan, others=others, **gang)
        self._model = model
        self._memory = memory_floor(model, self.config.precision)
        self._checked: LRUCache[None] = LRUCache(MAX_KNOWN)
        self._was_warm = False
        self._pipelined: LRUCache[None] = LRUCache(MAX_KNOWN)
        make_kernel = kernel_by_length(self.config.exchange, self.device, self.dtype)
        self._sharded = ShardedModel(model, self._prepare_module, make_kernel=make_kernel)
        self._steps = StepRunner(model, self._sharded, config=self.config, device=self.device)
        if self.config.precision != "native" and model.weights is None:
            self._split_weights_first()

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.predict``. Neighbouring branches of equal shape may run at the same time (guidance).

        ``ValueError``, on all ranks and before any exchange, for a step that certainly does not fit their memory.
        ``JobFailedError`` likewise for one that the module cannot compute.
        """
        self._check_memory(branches, ranks)
        with forward_fails_alone():
            return self._predict(branches, ranks)

    def _predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        if self.division.team(ranks).pipeline.size > 1:
            shapes = (ranks, *map(shape_of, branches))
            self._was_warm = shapes in self._pipelined
            self._pipelined.get(shapes, lambda: None)
            return predict_pipelined(self._sharded, self.division.forwards(branches, ranks))
        self._was_warm = True
        return self.division.predict(branches, ranks, self._run)

    def close(self) -> None:
        """Let go of graphs, modules and compiled code, in this order. Process groups go with the communicator."""
        self._steps.close()
        self._sharded.close()
        for module in self._model.modules.values():
            release_blocks(module, self._model.plan)

    @property
    def was_warm(self) -> bool:
        """See ``Engine.was_warm``: all steps were replays, or (where nothing is captured) had shapes that had run."""
        return self._was_warm

    @property
    def team_sizes(self) -> tuple[int, ...]:
        return self.division.team_sizes

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Compile and capture for the shapes of ``branches``. Every rank of ``ranks`` makes the call."""
        for _ in range(RUNS_BEFORE_CAPTURE + 1):
            self.predict(branches, ranks)

    def release_steps(self) -> None:
        """Let go of what was captured, and of what steps keep; weights stay. Shapes are new after it."""
        self._steps.release()
        self._pipelined.clear()
        self._checked.clear()

    def use(self, rules: ExchangeRules) -> None:
        """Exchange heads by ``rules`` from now on. All ranks make the call between the same two steps; shapes are new
        after it."""
        self.config = replace(self.config, exchange=rules)
        self.release_steps()
        self._steps.rules = rules
        self._sharded.use(kernel_by_length(rules, self.device, self.dtype))

    def load_weights(self) -> None:
        """Make all modules of the whole gang's team now; of a model in files, this reads the caller's share."""
        for name in self._model.modules:
            self._sharded.module(name, self.division.team(tuple(range(self.team_sizes[-1]))))

    def _check_memory(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        for branch in branches:
            self._checked.get((len(ranks), shape_of(branch)), partial(self._check_one, branch, ranks))

    def _check_one(self, branch: Branch, ranks: tuple[int, ...]) -> None:
        num_tokens = sum(self._model.stream_lengths(branch.arguments).values())
        self._memory.check(num_tokens, self.division.team(ranks).spec)

    def _split_weights_first(self) -> None:
        """Layers are split as they were loaded: teams with whole weights get quantised ones in the module itself."""
        for team in self.division.teams.all():
            for name in self._model.modules if team.tensor.size > 1 else ():
                self._sharded.module(name, team)

    def _run(self, branch: Branch, team: Team) -> Tensor:
        self._sharded.set_additions(branch, team, self._steps.quantised_weights(branch.module, team))
        prediction = self._steps.run(branch, team)
        self._was_warm = self._was_warm and self._steps.was_warm
        return prediction

    def _prepare_module(self, name: str, module: nn.Module, plan: ShardPlan) -> None:
        """Quantise the layers and compile the blocks of a module without a fast path."""
        if scheme := scheme_of(self.config.precision):
            path = self.config.calibration
            swap_linears(module, plan, scheme, None if path is None else load_calibration(Path(path), name))
        if self.config.compile_blocks:
            compile_blocks(module, plan)


def _name(strategy: str | TeamSpecs) -> str:
    """As configurations say it: divisions that were decided come of "auto"."""
    return strategy if isinstance(strategy, str) else "auto"
