"""Steps of a gang that are timed to find the fastest way to take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from engines.core.engine import Choosing
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel
from engines.core.rank import RankContext
from engines.core.spec import ParallelSpec
from engines.parallel.communication.mesh import Team
from engines.parallel.division import TeamSpecs
from engines.planner.exchange_rules import ExchangeRules
from engines.planner.forecast import StepForecast
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.alternatives import DividedForward, alternatives
from engines.torch_engine.fast_step import can_run
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE

Pair = tuple[ParallelSpec, ParallelSpec]
"""How a team divides one branch, and two at once."""

NOISE = 0.03
"""Times that differ by no more than this are equal. Of strategies then the simpler name is taken, the first of the
alphabet; of ways to exchange heads the usual one."""

NUM_TIMED = 5
"""Steps of each candidate whose median counts, after as many as it takes until they are replayed."""


class Trial:
    """Times the steps of ways to divide them that ``plans`` hold for nearly as good as the best."""

    def __init__(
        self, model: DenoiserModel, choosing: Choosing, plans: Mapping[int, tuple[StepForecast, StepForecast]]
    ) -> None:
        self._model, self._plans = model, plans
        self._branches = choosing.typical_step() if model.weights is None else ()
        self._largest = max(plans)
        self._sizes = [size for size in plans if size > 1 and (choosing.every_team or size == self._largest)]
        self.times_ms: dict[str, float] = {}

    @property
    def candidates(self) -> tuple[ParallelSpec, ...]:
        if not self._branches:
            return ()
        return tuple(spec for size in self._sizes for plan in self._plans[size] for spec in plan.shortlist())

    @torch.no_grad()
    def decide(self, engine: TorchEngine, context: RankContext) -> TeamSpecs:
        """The fastest way for each size of team; as predicted for those that do not work, or whose steps are not known
        before a request. All ranks make the call, and get the same answer."""
        decided = dict(engine.division.specs.by_size)
        for size in self._sizes if self._branches else ():
            first = context.rank // size * size
            ranks = tuple(range(first, first + size))

            def time_pair(pair: Pair, branches: tuple[Branch, ...], ranks: tuple[int, ...] = ranks) -> float:
                return self._time_pair(engine, pair, branches, ranks)

            single, paired = (plan.shortlist() for plan in self._plans[size])
            (one, _) = _fastest([(spec, spec) for spec in single], partial(time_pair, branches=self._branches[:1]))
            pair = (one, self._plans[size][1].chosen.spec)
            if len(self._branches) > 1:
                # Branches that do not run at the same time run as a single one does.
                pairs = dict.fromkeys((one, spec if spec.guidance > 1 else one) for spec in paired)
                pair = _fastest(list(pairs), partial(time_pair, branches=self._branches[:2]))
            decided[size] = pair
        return TeamSpecs(by_size=decided)

    @torch.no_grad()
    def decide_exchange(self, engine: TorchEngine, *, peer_memory: bool) -> ExchangeRules:
        """The rules by which the whole gang exchanges heads fastest, divided as it is now. One after the other is
        changed, and stays so if that is faster by more than noise: so few steps are tried, and not all products.

        ``peer_memory``: whether that is left to choose. All ranks make the call, and get the same answer.
        """
        rules, ranks = engine.config.exchange, tuple(range(self._largest))
        is_paired = engine.division.specs.of(self._largest)[-1].guidance > 1
        branches = self._branches[: 2 if is_paired else 1]
        times_s: dict[ExchangeRules, float] = {}

        def time_s(tried: ExchangeRules) -> float:
            if tried not in times_s:
                engine.use(tried)
                times_s[tried] = self._time(engine, branches, ranks, f", exchange {tried.describe()}")
            return times_s[tried]

        forwards = tuple(self._forward(engine, *each) for each in engine.division.forwards(branches, ranks))
        for change in alternatives(forwards, engine.device, engine.dtype, peer_memory=peer_memory):
            changed = change(rules)
            if changed is not None and time_s(rules) > (1 + NOISE) * time_s(changed):
                rules = changed
        return rules

    def _forward(self, engine: TorchEngine, branch: Branch, team: Team) -> DividedForward:
        lengths, num_heads = self._model.stream_lengths(branch.arguments), self._model.num_heads
        return DividedForward(
            team=team,
            num_tokens=TokenLayout.of(self._model.plan.streams, lengths, team.context.size).num_tokens,
            is_fast=engine.config.fast and can_run(team, num_heads),
            is_even=num_heads % team.ulysses.size == 0,
        )

    def _time_pair(
        self, engine: TorchEngine, pair: Pair, branches: tuple[Branch, ...], ranks: tuple[int, ...]
    ) -> float:
        engine.division.use(TeamSpecs(by_size={**engine.division.specs.by_size, len(ranks): pair}))
        return self._time(engine, branches, ranks)

    def _time(self, engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...], way: str = "") -> float:
        time_s = step_time_s(engine, branches, ranks)
        engine.release_steps()
        name = engine.division.team(ranks, len(branches)).spec.name
        self.times_ms[f"{name} on {len(ranks)}, branches: {len(branches)}{way}"] = round(1e3 * time_s, 3)
        return time_s


def step_time_s(engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> float:
    """Seconds of a step on the slowest rank of the gang, whose teams all work at the same time."""
    for _ in range(RUNS_BEFORE_CAPTURE + 2):
        engine.predict(branches, ranks)
    times_s = torch.tensor([_timed_s(engine, branches, ranks) for _ in range(NUM_TIMED)], device=engine.device)
    dist.all_reduce(times_s, op=dist.ReduceOp.MAX)
    return float(median(times_s.tolist()))


def _timed_s(engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> float:
    _wait(engine.device)
    started_s = time.perf_counter()
    engine.predict(branches, ranks)
    _wait(engine.device)
    return time.perf_counter() - started_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(pairs: list[Pair], time_pair: Callable[[Pair], float]) -> Pair:
    """Of those whose times noise explains, the one with the simplest names, first in the alphabet."""
    if len(pairs) == 1:
        return pairs[0]
    times_s = {pair: time_pair(pair) for pair in pairs}
    limit_s = (1 + NOISE) * min(times_s.values())
    near = [pair for pair, time_s in times_s.items() if time_s <= limit_s]
    return min(near, key=lambda pair: [(spec.name.count("x"), spec.name) for spec in pair])
