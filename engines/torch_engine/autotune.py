"""Strategy "auto": the cost model ranks divisions, timed steps choose among the best, and a file records the choice.

The cost model is calibrated at each start, and divisions that it ranks equal may differ by a sixth. So the choice is
made once per machine and model: a rebuilt gang gives a seed the same bytes. All ranks of a gang call the functions of
this module together and get the same results.

Steps of a 720p clip take seconds. All blocks of a list are alike, so a few show how divisions of such a step compare.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engines.additions import touch_copies
from engines.core.engine import Choosing, RankContext
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec, scheme_of
from engines.core.storage import HostLock, device_name
from engines.parallel.collectives import Axis
from engines.parallel.copies import truncated
from engines.parallel.division import TeamSpecs
from engines.parallel.early_start import gang_groups
from engines.parallel.mesh import Team
from engines.planner.auto import as_predicted, forecasts, lengths_of_choice, possible_team_sizes
from engines.planner.forecast import StepForecast, estimates_of
from engines.torch_engine.config import TorchChoices, check_divisible, check_spec, resolve
from engines.torch_engine.decision import MIN_BRANCHES, REVISION, Decision, DecisionFile, Specs
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules, goes_in_parts, meets_peers
from engines.torch_engine.exchange.peer_memory import reachable
from engines.torch_engine.options import TorchOptions

logger = logging.getLogger(__name__)

NOISE, LONG_NOISE = 0.03, 0.01
"""Step times within this fraction are equal: the simpler name wins, then the alphabet, or the default exchange. The
second is for strategies of long steps: times of their blocks differed by 0.1 to 0.5 % between runs on H200s."""
NUM_TIMED = 5
"""Timed steps of a candidate, after one that shows whether it is long. The shortest counts: load can only add time."""
LONG_STEP_S = 0.5
"""If a step is predicted to take longer, only its first blocks are timed: as many as take this long by prediction.

A whole step that takes longer, whatever was predicted, is timed once."""
MIN_BLOCKS = 2
"""Blocks of each list that are timed of a long step, at least."""
NUM_TIMED_LONG = 2
"""Timed runs of such blocks. They are not captured: launches hide behind kernels of milliseconds, and a capture costs
two runs more."""

POLL_S, PATIENCE_S = 0.1, 180.0
"""Pause between tries to take the lock, and the longest wait at one start: a clip decoder compiles for minutes."""

EXCHANGE_FIELDS = ("parts_from_tokens", "peer_memory", "side_streams")
"""Fields of the exchange rules, in the order in which alternatives are timed."""

T = TypeVar("T")


def autotuned_engine(
    model: DenoiserModel,
    context: RankContext,
    choosing: Choosing,
    *,
    precision: str,
    options: TorchOptions,
    attention: str = "auto",
) -> TorchEngine:
    """Return an engine that divides steps by the decision file, or by steps timed now.

    Candidates run one after another in one engine on the same weights, and release their captures in between.
    Strategies that divide weights are chosen by prediction: each trial would read all weights again. Groups wait for
    the early start, before any exchange.
    """
    check_divisible(model, "auto", context.num_ranks)
    gang: dict[str, Any] = {"rank": context.rank, "num_ranks": context.num_ranks, "groups": gang_groups()}
    how: dict[str, Any] = {"precision": precision, "attention": attention, "options": options}
    make: Callable[..., TorchEngine] = partial(TorchEngine, **how)
    file = _decision_file(model, choosing, **how)
    decision = from_rank_0(lambda: file.read(possible_team_sizes(model, context.num_ranks)))
    if decision is not None:
        _log("strategy of an earlier start", decision, file)
        return _configured(make(model, strategy=decision.specs), decision, options)
    step, lock = choosing.typical_step(), GangLock(choosing.lock)
    gang |= {"device": model.device, "originals_on_host": options.originals_on_host}
    gang |= {"precision": scheme_of(precision) or "native", "num_branches": max(len(step), MIN_BRANCHES)}
    with lock.held():
        plans = forecasts(model, attention=attention, **gang)
    branches = step if model.weights is None else ()
    sizes = [size for size in plans if size > 1 and (choosing.every_team or size == max(plans))] if branches else []
    candidates = (spec for size in sizes for plan in plans[size] for spec in plan.shortlist())
    timed = model_to_time(model, branches, plans, resolve(model, model.device, **how))
    if timed is not model and options.originals_on_host:  # which trials of blocks leave out
        touch_copies(model)
    engine = make(timed, strategy=as_predicted(plans), others=candidates, capture=timed is model)
    tuner = Autotuner(timed, engine, branches, plans, lock, is_whole=timed is model)
    fastest = tuner.decide(sizes, peer_memory=options.peer_memory == "auto")
    decision = from_rank_0(lambda: file.write(fastest, tuner.times_ms))
    _log("strategy is decided", decision, file, times_ms=tuner.times_ms)
    if timed is not model or not engine.division.has_teams_for(decision.specs):  # the latter if another gang was first
        fast_weights = engine.fast_weights  # released by close
        engine.close()
        engine = make(model, strategy=decision.specs, fast_weights=fast_weights)
    engine.division.use(decision.specs)
    return _configured(engine, decision, options)


def model_to_time(
    model: DenoiserModel,
    branches: tuple[Branch, ...],
    plans: Mapping[int, tuple[StepForecast, ...]],
    config: TorchChoices,
) -> DenoiserModel:
    """Return ``model``, or its first blocks if steps of ``branches`` are long by prediction, on the whole gang too.

    The blocks share the tensors of ``model``, which stays as it is. They have no additions: these change no time, and
    originals would be copied. Hand-ordered steps, which arrange weights anew, and offloaded blocks are timed whole.
    So are steps whose blocks or weights are divided.
    """
    divides_weights = any(plan.chosen.spec.divides_weights for several in plans.values() for plan in several)
    if not branches or config.fast or config.offloaded_blocks or divides_weights:
        return model
    modules = {branch.module: model.modules[branch.module] for branch in branches}
    plain = replace(model, modules=modules, additions={}, additions_change=False)
    most = _most_blocks(plain)
    num_blocks = max(MIN_BLOCKS, math.ceil(most * 1e3 * LONG_STEP_S / plans[max(plans)][0].chosen.total_ms))
    if num_blocks >= most:
        return model
    logger.info("long steps are timed on their first blocks", extra={"num_blocks": num_blocks, "of": most})
    return truncated(plain, num_blocks)


def _log(message: str, decision: Decision, file: DecisionFile, **fields: object) -> None:
    logger.info("%s: %s", message, decision.describe(), extra={"file": str(file.path), **fields})


def _configured(engine: TorchEngine, decision: Decision, options: TorchOptions) -> TorchEngine:
    exchange = decision.exchange
    if isinstance(options.peer_memory, bool):  # the decision may come from a gang with "auto"
        exchange = replace(exchange, peer_memory=options.peer_memory)
    if engine.config.exchange != exchange:
        engine.use(exchange)
    engine.estimates = decision.estimates
    return engine


def _decision_file(
    model: DenoiserModel, choosing: Choosing, precision: str, attention: str, options: TorchOptions
) -> DecisionFile:
    facts = {
        "devices": ", ".join(from_all_ranks(device_name(str(model.device)))),
        "precision": precision,
        "peer_memory": str(options.peer_memory is not False),
        "tokens": str(dict(lengths_of_choice(model, model.device))),
        "every_team": str(choosing.every_team),
        "attention": attention,
        "originals_on_host": str(options.originals_on_host),
        "revision": str(REVISION),
    }
    facts, check = {**choosing.facts, **facts}, partial(check_spec, model)
    return DecisionFile(folder=choosing.folder, name=choosing.name, facts=facts, check=check)


def _most_blocks(model: DenoiserModel) -> int:
    """Return the length of the longest list of blocks; 0 without one."""
    lists = (module.get_submodule(own) for module in model.modules.values() for own in model.plan.blocks)
    return max((len([*each.children()]) for each in lists), default=0)


class Autotuner:
    """Times candidates in the steps of ``branches``. ``plans`` are forecasts by team size, for one branch and more.

    ``is_whole``: the model has all its blocks; otherwise its steps are long (``model_to_time``).
    """

    def __init__(
        self,
        model: DenoiserModel,
        engine: TorchEngine,
        branches: tuple[Branch, ...],
        plans: Mapping[int, tuple[StepForecast, ...]],
        lock: GangLock,
        *,
        is_whole: bool = True,
    ) -> None:
        self._model, self._engine, self._plans = model, engine, plans
        self._branches = branches if is_whole else tuple(replace(branch, additions=()) for branch in branches)
        self._lock, self._is_whole = lock, is_whole
        self.times_ms: dict[str, float] = {}

    def decide(self, sizes: Iterable[int], *, peer_memory: bool) -> Decision:
        """Return the fastest strategies of teams of these ``sizes``, and the fastest exchange."""
        for size in sizes:
            self.tune_strategy(size)
        exchange, specs = self.fastest_exchange(peer_memory=peer_memory), self._engine.division.specs
        return Decision(specs=specs, exchange=exchange, estimates=estimates_of(self._plans, specs))

    def tune_strategy(self, size: int) -> None:
        """Set the fastest division for teams of ``size``. Numbers of branches beyond the step's stay as predicted."""
        division, alone_s = self._engine.division, 0.0
        best: Specs = ()
        first = dist.get_rank() // size * size
        ranks = tuple(range(first, first + size))
        for number, plan in enumerate(self._plans[size], start=1):
            specs: Specs = (plan.chosen.spec,)
            if number <= len(self._branches):  # branches that do not all run at once use the division of fewer
                specs = tuple(spec if number in (1, spec.guidance) else best[-1] for spec in plan.shortlist())
            times_s = dict.fromkeys(((*best, spec) for spec in specs), 0.0)
            for candidate in times_s if len(times_s) > 1 else ():
                if alone_s and self._is_long(alone_s) and candidate[-1].guidance == 1:  # one branch after the other
                    times_s[candidate] = number * alone_s
                    continue
                division.use(TeamSpecs(by_size={**division.specs.by_size, size: candidate}))
                times_s[candidate] = self._time_s(self._branches[:number], ranks)
            shortest_s = min(times_s.values())
            limit_s = (1 + (LONG_NOISE if self._is_long(shortest_s) else NOISE)) * shortest_s
            near = [candidate for candidate, time_s in times_s.items() if time_s <= limit_s]
            best = min(near, key=lambda candidate: [(spec.name.count("x"), spec.name) for spec in candidate])
            alone_s = times_s[best] if number == 1 else alone_s
        division.use(TeamSpecs(by_size={**division.specs.by_size, size: best}))

    def fastest_exchange(self, *, peer_memory: bool) -> ExchangeRules:
        """Return the fastest rules for the whole gang. Fields are changed one after another, not in all combinations.

        ``peer_memory``: whether to choose its use as well.
        """
        engine, ranks = self._engine, tuple(range(max(self._plans)))
        rules, times_s = engine.config.exchange, dict[ExchangeRules, float]()
        specs = engine.division.specs.of(len(ranks))
        branches = self._branches[: specs[-1].guidance]
        last = len(branches) - 1  # of the plans and specs, which begin with those for one branch
        if is_exchange_negligible(self._plans[len(ranks)][last], specs[last]):
            return rules
        forwards = tuple(self._forward(*each) for each in engine.division.forwards(branches, ranks))
        reaches = partial(reachable, device=engine.device, dtype=engine.dtype) if peer_memory else None

        def time_s(candidate: ExchangeRules) -> float:
            if candidate not in times_s:
                engine.use(candidate)
                times_s[candidate] = self._time_s(branches, ranks, f", exchange {candidate.describe()}")
            return times_s[candidate]

        for name in EXCHANGE_FIELDS if overlaps(engine.device) else ():
            changed = alternative(name, rules, forwards, reaches)
            if changed is not None and time_s(rules) > (1 + NOISE) * time_s(changed):
                rules = changed
        return rules

    def _forward(self, branch: Branch, team: Team) -> DividedForward:
        lengths = self._model.stream_lengths(branch.arguments)
        return DividedForward(
            team=team,
            num_tokens=TokenLayout.of(self._model.plan.streams, lengths, team.context.size).num_tokens,
            is_fast=self._engine.config.fast and not team.spec.divides_weights,
            is_even=self._model.num_heads % team.ulysses.size == 0,
        )

    def _time_s(self, branches: tuple[Branch, ...], ranks: tuple[int, ...], exchange: str = "") -> float:
        """Return the seconds of a step on the gang's slowest rank, while all teams of this size work."""
        engine = self._engine
        engine.warm_up(branches, ranks)
        time_s = self._shortest_s(branches, ranks, 1 if self._is_whole else NUM_TIMED_LONG)
        if not self._is_long(time_s):
            time_s = self._shortest_s(branches, ranks, NUM_TIMED)
        engine.release_steps()
        name = engine.division.team(ranks, len(branches)).spec.name
        blocks = "" if self._is_whole else f", first {_most_blocks(self._model)} blocks"
        self.times_ms[f"{name} on {len(ranks)}, branches: {len(branches)}{exchange}{blocks}"] = round(1e3 * time_s, 3)
        return time_s

    def _is_long(self, time_s: float) -> bool:
        """Return whether a step is long whose timed blocks take ``time_s``."""
        return not self._is_whole or time_s > LONG_STEP_S

    def _shortest_s(self, branches: tuple[Branch, ...], ranks: tuple[int, ...], num_timed: int) -> float:
        """Return the shortest of ``num_timed`` steps, each by the slowest rank, while no process prepares."""
        with self._lock.held():
            timed_s = [_timed_s(self._engine, branches, ranks) for _ in range(num_timed)]
            times_s = torch.tensor(timed_s, device=self._engine.device)
            dist.all_reduce(times_s, op=dist.ReduceOp.MAX)
            return float(times_s.min())


def is_exchange_negligible(plan: StepForecast, spec: ParallelSpec) -> bool:
    """Return whether a faster exchange would shorten the step of ``spec`` by no more than noise.

    False for a short step, whose prediction is less exact and whose trials cost little.
    """
    cost = next(cost for cost in plan.costs if cost.spec == spec)
    return cost.total_ms > 1e3 * LONG_STEP_S and cost.exchange_ms <= NOISE * cost.total_ms


def _timed_s(engine: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> float:
    _wait(engine.device)
    started_s = time.perf_counter()
    engine.predict(branches, ranks)
    _wait(engine.device)
    return time.perf_counter() - started_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedForward:
    """One rank's forward in the step."""

    team: Team
    """How ranks divide it."""
    num_tokens: int
    """Tokens of all streams together, without padding."""
    is_fast: bool
    """True if the hand-ordered step runs it."""
    is_even: bool
    """True if ranks that exchange heads get equal numbers."""

    @property
    def exchanges_heads(self) -> bool:
        """Return whether the module's ranks exchange heads, which may go in parts."""
        return not self.is_fast and self.team.ulysses.size > 1

    @property
    def gathers_keys(self) -> bool:
        """Return whether the module's ranks gather keys alone: through peer memory where others go in parts."""
        return not self.is_fast and self.team.allgather_kv.size == self.team.context.size > 1

    def may_meet_peers(self, rules: ExchangeRules) -> bool:
        """Return the choice of ``fast_step`` and ``choose``, assuming that memory is reachable."""
        if self.is_fast:
            is_supported = self.team.ulysses.size == self.team.context.size
        else:
            is_supported = self.is_even and goes_in_parts(rules, self.num_tokens)
        return is_supported and meets_peers(self.team)


def overlaps(device: torch.device) -> bool:
    """Return whether exchanges overlap with other work on the device; otherwise there is nothing to choose."""
    return device.type == "cuda"


def alternative(
    name: str, rules: ExchangeRules, forwards: tuple[DividedForward, ...], reaches: Callable[[Axis], bool] | None
) -> ExchangeRules | None:
    """Return ``rules`` with another value of one field, or None if that changes no step.

    ``reaches``: whether ranks of an axis can write into each other's memory; None: do not choose it.
    """
    if name == "parts_from_tokens":
        changing = [each for each in forwards if each.exchanges_heads]
        keys = [each for each in forwards if each.gathers_keys and not goes_in_parts(rules, each.num_tokens)]
        if keys and rules.peer_memory and reaches is not None and _reach_anywhere(keys, reaches):
            changing += keys
        lengths = [each.num_tokens for each in changing]
        if not lengths:
            return None
        # Monotonic in length: parts that slow a long step do not speed up a shorter one, and vice versa.
        in_parts = any(goes_in_parts(rules, length) for length in lengths)
        return replace(rules, parts_from_tokens=max(lengths) + 1 if in_parts else min(lengths))
    if name == "side_streams":
        changes = any(each.is_fast and each.team.context.size > 1 for each in forwards)
        return replace(rules, side_streams=not rules.side_streams) if changes else None
    if reaches is None or not _reach_anywhere([each for each in forwards if each.may_meet_peers(rules)], reaches):
        return None
    return replace(rules, peer_memory=not rules.peer_memory)


def _reach_anywhere(forwards: Iterable[DividedForward], reaches: Callable[[Axis], bool]) -> bool:
    """Return whether a team of ``forwards`` does on any rank: teams of one gang may lie on several hosts."""
    return any(from_all_ranks(any(reaches(each.team.context) for each in forwards)))


class GangLock:
    """The locks of all hosts of a gang: no other process prepares on their GPUs while steps are timed."""

    def __init__(self, lock: HostLock | None) -> None:
        """Use ``lock`` of this rank's host; None: wait for no other process."""
        self._lock, self._polls_left = lock, round(PATIENCE_S / POLL_S)
        host = socket.gethostname()
        self._is_first_of_host = lock is not None and from_all_ranks(host).index(host) == dist.get_rank()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all locks inside the block; run it without them once the patience, shared by all calls, is used up."""
        with ExitStack() as held:
            while self._lock is not None and not self._take(self._lock, held):
                if self._polls_left == 0:
                    logger.warning("steps are timed while other processes prepare: no lock after %.0f s", PATIENCE_S)
                    break
                self._polls_left -= 1
                time.sleep(POLL_S)
            yield

    def _take(self, lock: HostLock, held: ExitStack) -> bool:
        """Take the locks of all hosts or none; otherwise two gangs on the same hosts could deadlock."""
        own = lock.try_exclusive() if self._is_first_of_host else nullcontext()
        are_free = all(from_all_ranks(own is not None))
        with ExitStack() as taken:
            if own is not None:
                taken.enter_context(own)
            if are_free:
                held.enter_context(taken.pop_all())
        return are_free


def from_rank_0(call: Callable[[], T]) -> T:
    """Return rank 0's result of ``call`` on all ranks."""
    return from_all_ranks(call() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def from_all_ranks(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on all ranks."""
    values: list[Any] = [value] * dist.get_world_size()
    if len(values) > 1:  # a single rank has no communicator yet
        dist.all_gather_object(values, value)
    return values
