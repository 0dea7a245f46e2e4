"""What strategy "auto" means: of the best by prediction, the one whose steps are fastest here; decided once, and kept.

The cost model's figures are measured anew at each start, and two ways that it holds for equal may differ by a sixth. So
it ranks the ways, real steps decide, and the decision is kept: a gang that is rebuilt gives the same bytes.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engines.core.engine import Choosing
from engines.core.model import Branch, DenoiserModel
from engines.core.precision import scheme_of
from engines.core.rank import RankContext
from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.parallel.early_start import gang_groups
from engines.planner.auto import forecasts, lengths_of_choice, possible_team_sizes
from engines.planner.forecast import StepForecast
from engines.planner.kept import KeptDecision
from engines.torch_engine.config import check_divisible, check_spec
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE

T = TypeVar("T")
Pair = tuple[ParallelSpec, ParallelSpec]
"""How a team divides one branch, and two at once."""

NOISE = 0.03
"""Times that differ by no more than this are equal; then the simpler name is taken, the first of the alphabet."""

NUM_TIMED = 5
"""Steps of each candidate whose median counts, after as many as it takes until they are replayed."""

logger = logging.getLogger(__name__)


def decided_engine(
    model: DenoiserModel, context: RankContext, choosing: Choosing, *, precision: str, options: TorchOptions
) -> TorchEngine:
    """An engine that divides steps as was decided before, or is now. All ranks of the gang make the call.

    Candidates run in one engine, one after the other and on the same weights; what one has captured is released before
    the next. Ways that divide the weights are taken by prediction: to try them means to read all weights again.
    """
    check_divisible(model, "auto", context.num_ranks)
    gang_groups()  # waits for the early start: no exchange comes before it
    make = partial(TorchEngine, model, precision=precision, options=options)
    kept = _kept_decision(model, choosing, precision, options)
    sizes = possible_team_sizes(model, context.num_ranks)
    specs = _of_rank_0(lambda: kept.find(sizes))
    if specs is not None and _suits(model, specs):
        logger.info("strategy as it was decided: %s", _names(specs), extra={"file": str(kept.file)})
        return make(strategy=specs)
    gang: dict[str, Any] = {"rank": context.rank, "num_ranks": context.num_ranks, "groups": gang_groups()}
    plans = forecasts(model, device=model.device, precision=scheme_of(precision) or "native", **gang)
    predicted = TeamSpecs(by_size={size: tuple(plan.chosen.spec for plan in both) for size, both in plans.items()})
    trial = Trial(model, choosing, plans)
    engine = make(strategy=predicted, others=trial.candidates)
    fastest = trial.decide(engine, context)
    specs = _of_rank_0(lambda: kept.keep(fastest, trial.times_ms))
    logger.info("strategy is decided: %s", _names(specs), extra={"file": str(kept.file), "times_ms": trial.times_ms})
    if engine.division.knows(specs):
        engine.division.use(specs)
        return engine
    engine.close()  # another gang was first, and found a way that this one did not try
    return make(strategy=specs)


class Trial:
    """Times the steps of ways to divide them that ``plans`` hold for nearly as good as the best."""

    def __init__(
        self, model: DenoiserModel, choosing: Choosing, plans: Mapping[int, tuple[StepForecast, StepForecast]]
    ) -> None:
        self._plans = plans
        self._branches = choosing.typical_step() if model.weights is None else ()
        largest = max(plans)
        self._sizes = [size for size in plans if size > 1 and (choosing.every_team or size == largest)]
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
                return self._time(engine, pair, branches, ranks)

            single, paired = (plan.shortlist() for plan in self._plans[size])
            (one, _) = _fastest([(spec, spec) for spec in single], partial(time_pair, branches=self._branches[:1]))
            pair = (one, self._plans[size][1].chosen.spec)
            if len(self._branches) > 1:
                # Branches that do not run at the same time run as a single one does.
                pairs = dict.fromkeys((one, spec if spec.guidance > 1 else one) for spec in paired)
                pair = _fastest(list(pairs), partial(time_pair, branches=self._branches[:2]))
            decided[size] = pair
        return TeamSpecs(by_size=decided)

    def _time(self, engine: TorchEngine, pair: Pair, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> float:
        engine.division.use(TeamSpecs(by_size={**engine.division.specs.by_size, len(ranks): pair}))
        time_s = step_time_s(engine, branches, ranks)
        engine.release_steps()
        name = f"{pair[len(branches) - 1].name} on {len(ranks)}, branches: {len(branches)}"
        self.times_ms[name] = round(1e3 * time_s, 3)
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


def _kept_decision(model: DenoiserModel, choosing: Choosing, precision: str, options: TorchOptions) -> KeptDecision:
    """What the decision depends on, beside the model and the software: the ranks' devices and the step."""
    kept = KeptDecision(folder=choosing.folder, name=choosing.name, facts=choosing.facts)
    return kept.about(
        {
            "devices": ", ".join(_gathered(_device_name(model.device))),
            "precision": precision,
            "peer_memory": str(options.peer_memory),
            "tokens": str(dict(lengths_of_choice(model, model.device))),
            "every_team": str(choosing.every_team),
        }
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _suits(model: DenoiserModel, specs: TeamSpecs) -> bool:
    try:
        for spec in specs.every():
            check_spec(model, spec)
    except ValueError as error:
        logger.warning("what was decided does not suit the model (%s): it is decided anew", error)
        return False
    return True


def _of_rank_0(ask: Callable[[], T]) -> T:
    """What ``ask`` answers on rank 0, on all ranks."""
    shared: list[Any] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]  # type: ignore[no-any-return]


def _gathered(name: str) -> Iterable[str]:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return names


def _names(specs: TeamSpecs) -> str:
    return "; ".join(f"{size}: {' or '.join(s.name for s in dict.fromkeys(specs.of(size)))}" for size in specs.sizes)
