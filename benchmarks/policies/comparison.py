"""A load that was sent, beside the same arrivals through the scheduler and the policy themselves: what each came to.

Each model's requests go through a simulated gang of its own, once with steps as long as alone, and once as long as they
were in the run (``stretch`` times as long: gangs share cores or GPUs with each other, with encoders and decoders, and
with whatever else runs). A request is in time within ``scale`` times what its class takes alone; what is refused or
fails is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from benchmarks.load.alone import Alone, rank_seconds
from benchmarks.load.arrivals import Arrival
from benchmarks.load.client import Outcome
from benchmarks.load.summary import eta, gpu_use, points
from benchmarks.policies.shares import Served, shares
from benchmarks.policies.simulation import Arrival as SimulatedArrival
from benchmarks.policies.simulation import SimulatedGang, Simulation, Span
from deployments.config import ServeConfig
from deployments.requests.rules import TIERS
from deployments.stages.common import PRIORITIES
from engines.core.spec import tiling_sizes
from engines.gang.gang_config import GangConfig
from engines.gang.policies.policy import make_policy

DEADLINE = "deadline"
"""The policy under which requests say when they must be done."""

Latency = float | None
"""Seconds until it was answered; None if it was refused, or failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A policy, the gangs by their models, and what classes take alone."""

    policy: str
    scale: float
    gangs: Mapping[str, GangConfig]
    alone: Mapping[str, Alone]

    @classmethod
    def of(cls, config: ServeConfig, policy: str, scale: float, alone: Mapping[str, Alone]) -> Case:
        """ValueError for a model with several gangs, which are not simulated, and for one that is not served; and for a
        class whose number of ranks nobody knows."""
        for model in config.app.models:
            if model.denoiser.max_num_replicas > 1:
                raise ValueError(f"{model.name} has up to {model.denoiser.max_num_replicas} gangs; one is simulated")
        gangs = {model.name: model.denoiser for model in config.app.models}
        for name, one in alone.items():
            if one.model not in gangs:
                raise ValueError(f"class {name} was measured of {one.model}; served: {', '.join(gangs)}")
            if not one.num_ranks:
                raise ValueError(
                    f"class {name} was measured without metrics, which tell how many ranks made its steps: measure it "
                    "with --metrics, or leave it out of --alone"
                )
        return cls(policy=policy, scale=scale, gangs=gangs, alone=alone)

    @property
    def num_ranks(self) -> int:
        return sum(gang.num_ranks for gang in self.gangs.values())

    def limit_s(self, arrival: Arrival) -> float:
        return self.scale * self.alone[arrival.kind.name].lone_s

    def with_deadlines(self, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
        """Returns what is sent: the same, with deadlines if the policy goes by them."""
        if self.policy != DEADLINE:
            return tuple(arrivals)
        return tuple(
            replace(one, kind=one.kind.model_copy(update={"body": {**one.kind.body, "deadline_s": self.limit_s(one)}}))
            for one in arrivals
        )


@dataclass(kw_only=True, slots=True)
class Simulated:
    """What became of each arrival, when ranks were in its steps, and for how long they were in all, by the model."""

    latencies_s: list[Latency]
    steps: list[Sequence[Span]]
    rank_s: dict[str, float] = field(default_factory=dict)


def simulated(case: Case, arrivals: Sequence[Arrival], stretch: Mapping[str, float], *, refuses: bool) -> Simulated:
    """Steps are ``stretch`` (by the model) times as long as alone."""
    found = Simulated(latencies_s=[None] * len(arrivals), steps=[()] * len(arrivals))
    for model in {case.alone[arrival.kind.name].model for arrival in arrivals}:
        own = [i for i, arrival in enumerate(arrivals) if case.alone[arrival.kind.name].model == model]
        gang = simulated_gang(case, model, stretch.get(model, 1.0), refuses=refuses)
        simulation = Simulation(gang=gang, policy=make_policy(case.policy))
        for number, latency_s in simulation.run([_job(case, arrivals[i]) for i in own]).items():
            found.latencies_s[own[number]] = latency_s + case.alone[arrivals[own[number]].kind.name].other_s
            found.steps[own[number]] = simulation.steps[number]
        found.rank_s[model] = simulation.rank_s
    return found


def simulated_gang(case: Case, model: str, stretch: float, *, refuses: bool) -> SimulatedGang:
    limits = case.gangs[model]
    sizes = tiling_sizes(limits.num_ranks) if limits.elastic else (limits.num_ranks,)
    return SimulatedGang(
        steps={
            name: {size: stretch * step_s for size, step_s in one.by_size(sizes).items()}
            for name, one in case.alone.items()
            if one.model == model
        },
        num_ranks=limits.num_ranks,
        elastic=limits.elastic,
        max_running_jobs=limits.max_running_jobs,
        plans_ahead=limits.plans_ahead,
        refuses_late=refuses,
    )


def _job(case: Case, arrival: Arrival) -> SimulatedArrival:
    name, owner = arrival.kind.name, arrival.owner
    fields: dict[str, object] = {"deadline_s": case.limit_s(arrival)} if case.policy == DEADLINE else {}
    fields["priority"] = PRIORITIES[TIERS[arrival.kind.body.get("service_tier", "auto")]]
    if owner is not None:
        fields |= {"key": owner.name, "weight": owner.weight}
    return SimulatedArrival(at_s=arrival.at_s, shape=name, num_steps=case.alone[name].num_steps, fields=fields)


def stretches(case: Case, arrivals: Sequence[Arrival], before: str, after: str) -> dict[str, float]:
    """How many times as long as simulated as alone ranks were in steps, by the model, between two looks at the metrics.

    ``arrivals`` are those that were answered: who was refused took no steps. Nothing of a model whose metrics say
    nothing.
    """
    expected_s = simulated(case, arrivals, {}, refuses=False).rank_s
    then, now = rank_seconds(before), rank_seconds(after)
    spent_s: Counter[str] = Counter()
    for model, size in now:
        spent_s[model] += now[model, size] - then.get((model, size), 0.0)  # type: ignore[assignment]
    return {model: spent_s[model] / s for model, s in expected_s.items() if spent_s[model] > 0}


def compared(
    case: Case, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], before: str, after: str
) -> dict[str, Any]:
    """What the run came to under a policy, live and simulated, in all and by class; before and after it the metrics."""
    stretch = stretches(case, [arrivals[i] for i, one in enumerate(outcomes) if one.is_right], before, after)
    latencies_s: dict[str, Sequence[Latency]] = {
        "live": [one.latency_s if one.is_right else None for one in outcomes],
    }
    ends_s = {"live": max(one.at_s + one.latency_s for one in outcomes)}
    num_right = sum(one.is_right for one in outcomes)
    steps: dict[str, Sequence[Sequence[Span]]] = {"live": [spans_of(one) for one in outcomes]}
    use = {"live": gpu_use(before, after, ends_s["live"], case.num_ranks, num_right)}
    for name, factors in {"as_alone": {}, "as_in_run": stretch}.items():
        run = simulated(case, arrivals, factors, refuses=True)
        latencies_s[name], steps[name] = run.latencies_s, run.steps
        use[name] = simulated_use(run, arrivals, case.num_ranks)
    by_class = {
        kind: [i for i, one in enumerate(arrivals) if one.kind.name == kind]
        for kind in dict.fromkeys(one.kind.name for one in arrivals)
    }
    in_all = row_of(case, arrivals, latencies_s, range(len(arrivals)))
    return {
        "policy": case.policy,
        "elastic": any(gang.elastic for gang in case.gangs.values()),
        "statuses": dict(Counter(str(one.status) for one in outcomes)),
        "stretch": {model: round(value, 3) for model, value in stretch.items()},
        **in_all,
        "use": use,
        "owners": {name: owners_of(case, arrivals, latencies_s[name], steps[name]) for name in steps},
        "eta": {"all": eta(outcomes)} | {kind: eta([outcomes[i] for i in by_class[kind]]) for kind in by_class},
        "classes": {kind: row_of(case, arrivals, latencies_s, numbers) for kind, numbers in by_class.items()},
    }


def spans_of(outcome: Outcome) -> list[Span]:
    """When ranks were at work for it, as if evenly from its first step to its last; nothing of what was not made."""
    if not outcome.is_right:
        return []
    end_s = outcome.at_s + outcome.latency_s - outcome.stages_ms.get("decode", 0.0) / 1e3
    return [Span(end_s - outcome.stages_ms.get("denoise", 0.0) / 1e3, end_s, outcome.gpu_s)]


def owners_of(
    case: Case, arrivals: Sequence[Arrival], latencies_s: Sequence[Latency], steps: Sequence[Sequence[Span]]
) -> dict[str, Any]:
    """What each owner had of each model's gang; nothing if nobody owns the requests."""
    by_model: dict[str, list[Served]] = {}
    for arrival, latency_s, spans in zip(arrivals, latencies_s, steps, strict=True):
        if arrival.owner is not None and latency_s is not None:
            alone, end_s = case.alone[arrival.kind.name], arrival.at_s + latency_s
            by_model.setdefault(alone.model, []).append(
                Served(owner=arrival.owner, at_s=arrival.at_s, end_s=end_s, lone_s=alone.lone_s, steps=spans)
            )
    return {model: shares(requests) for model, requests in by_model.items()}


def simulated_use(run: Simulated, arrivals: Sequence[Arrival], num_ranks: int) -> dict[str, float]:
    """The same as ``gpu_use`` says of a real run."""
    ends_s = [arrivals[i].at_s + latency_s for i, latency_s in enumerate(run.latencies_s) if latency_s is not None]
    rank_s = sum(run.rank_s.values())
    if not ends_s:
        return {}
    return {
        "rank_s_per_request": round(rank_s / len(ends_s), 4),
        "share_in_steps": round(rank_s / (max(ends_s) * num_ranks), 4),
    }


def row_of(
    case: Case, arrivals: Sequence[Arrival], latencies_s: Mapping[str, Sequence[Latency]], numbers: Sequence[int]
) -> dict[str, Any]:
    """Some of the requests, live and simulated; ``live_by_simulated`` is 1 where the means of those agree that were
    answered in both."""
    live = latencies_s["live"]
    row: dict[str, Any] = {"requests": len(numbers)}
    for name, found in latencies_s.items():
        known_s = {i: latency_s for i in numbers if (latency_s := found[i]) is not None}
        in_time = sum(latency_s <= case.limit_s(arrivals[i]) for i, latency_s in known_s.items())
        row[name] = {
            "answered": len(known_s),
            "attainment": round(in_time / len(numbers), 4),
            "latency_s": points(list(known_s.values())),
        }
    row["live_by_simulated"] = {
        name: _ratio([(live[i], found[i]) for i in numbers]) for name, found in latencies_s.items() if name != "live"
    }
    return row


def _ratio(pairs: Sequence[tuple[Latency, Latency]]) -> float | None:
    both = [(live_s, other_s) for live_s, other_s in pairs if live_s is not None and other_s is not None]
    return round(fmean(live_s for live_s, _ in both) / fmean(other_s for _, other_s in both), 3) if both else None
