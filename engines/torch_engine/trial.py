"""Steps of a gang that are timed to find the fastest way to take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

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
from engines.torch_engine.quiet import Quiet
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE

Way = tuple[ParallelSpec, ...]
"""How a team divides one branch, two at once, and so on."""

NOISE = 0.03
"""Times that differ by no more than this are equal. Of strategies then the simpler name is taken, the first of the
alphabet; of ways to exchange heads the usual one."""

NUM_TIMED = 5
"""Steps of each candidate of which the shortest counts, what else runs there can only add to it; after as many as it
takes until they are replayed, and one more, as the device may have waited for its turn."""


class Trial:
    """Times the steps of ways to divide them that ``plans`` hold for nearly as good as the best."""

    def __init__(
        self,
        model: DenoiserModel,
        branches: tuple[Branch, ...],
        plans: Mapping[int, tuple[StepForecast, ...]],
        *,
        every_team: bool,
        quiet: Quiet,
    ) -> None:
        """``branches`` are those of a typical step, of which ``plans`` forecast one, two, and so on. Steps are timed
        where it is ``quiet``."""
        self._model, self._plans = model, plans
        self._branches = branches if model.weights is None else ()
        self._largest, self._quiet = max(plans), quiet
        self._sizes = [size for size in plans if size > 1 and (every_team or size == self._largest)]
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
            decided[size] = self._decide_size(engine, tuple(range(first, first + size)))
        return TeamSpecs(by_size=decided)

    def _decide_size(self, engine: TorchEngine, ranks: tuple[int, ...]) -> Way:
        way: Way = ()
        for number, plan in enumerate(self._plans[len(ranks)], start=1):
            if number > len(self._branches):
                way = (*way, plan.chosen.spec)
                continue
            # Branches that do not all run at the same time run as fewer do.
            ways = dict.fromkeys((*way, spec if number in (1, spec.guidance) else way[-1]) for spec in plan.shortlist())
            time_way = partial(self._time_way, engine, branches=self._branches[:number], ranks=ranks)
            way = _fastest(list(ways), time_way)
        return way

    @torch.no_grad()
    def decide_exchange(self, engine: TorchEngine, *, peer_memory: bool) -> ExchangeRules:
        """The rules by which the whole gang exchanges heads fastest, divided as it is now. One after the other is
        changed, and stays so if that is faster by more than noise: so few steps are tried, and not all products.

        ``peer_memory``: whether that is left to choose. All ranks make the call, and get the same answer.
        """
        rules, ranks = engine.config.exchange, tuple(range(self._largest))
        branches = self._branches[: engine.division.specs.of(self._largest)[-1].guidance]
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
        lengths = self._model.stream_lengths(branch.arguments)
        return DividedForward(
            team=team,
            num_tokens=TokenLayout.of(self._model.plan.streams, lengths, team.context.size).num_tokens,
            is_fast=engine.config.fast and not team.spec.divides_weights,
            is_even=self._model.num_heads % team.ulysses.size == 0,
        )

    def _time_way(
        self, engine: TorchEngine, way: Way, *, branches: tuple[Branch, ...], ranks: tuple[int, ...]
    ) -> float:
        engine.division.use(TeamSpecs(by_size={**engine.division.specs.by_size, len(ranks): way}))
        return self._time(engine, branches, ranks)

    def _time(self, engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...], way: str = "") -> float:
        time_s = step_time_s(engine, branches, ranks, self._quiet)
        engine.release_steps()
        name = engine.division.team(ranks, len(branches)).spec.name
        self.times_ms[f"{name} on {len(ranks)}, branches: {len(branches)}{way}"] = round(1e3 * time_s, 3)
        return time_s


def step_time_s(engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...], quiet: Quiet) -> float:
    """Seconds of a step on the slowest rank of the gang, whose teams all work at the same time."""
    for _ in range(RUNS_BEFORE_CAPTURE + 2):
        engine.predict(branches, ranks)
    with quiet.alone():
        times = [_timed_s(engine, branches, ranks) for _ in range(1 + NUM_TIMED)]
        times_s = torch.tensor(times[1:], device=engine.device)
        dist.all_reduce(times_s, op=dist.ReduceOp.MAX)
        return float(times_s.min())


def _timed_s(engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> float:
    _wait(engine.device)
    started_s = time.perf_counter()
    engine.predict(branches, ranks)
    _wait(engine.device)
    return time.perf_counter() - started_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(ways: list[Way], time_way: Callable[[Way], float]) -> Way:
    """Of those whose times noise explains, the one with the simplest names, first in the alphabet."""
    if len(ways) == 1:
        return ways[0]
    times_s = {way: time_way(way) for way in ways}
    limit_s = (1 + NOISE) * min(times_s.values())
    near = [way for way, time_s in times_s.items() if time_s <= limit_s]
    return min(near, key=lambda way: [(spec.name.count("x"), spec.name) for spec in way])
