"""Models that take turns on the same GPUs, beside a gang for each model on GPUs of its own. By discrete events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from benchmarks.policies.h200 import NUM_STEPS, STEPS
from benchmarks.simulate_cluster.replicas import ClusterNode, JobReplica, Picture, PictureJob
from engines.gang.arbiter import Arbiter, Demand, Sharer

GIB = 2**30
SWAP_GIB_PER_S = 45.0
"""On an H100, 22 GiB of weights were back after 0.47 s and 38 GiB after 0.86 s. A sleep counts as long as a wake-up."""
BESIDE_GIB, ASLEEP_GIB = 6.0, 2.0
"""Memory of a gang beside its weights on each GPU, awake and asleep."""
USABLE_GIB = 76.0
"""Memory for models on a GPU with 80 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingModel:
    """A model. All have the step times of the same measurement."""

    name: str
    share: float
    """Part of all requests."""
    weights_gib: float
    """On each GPU of its gang."""

    @property
    def move_s(self) -> float:
        """Seconds of a sleep, or of a wake-up."""
        return self.weights_gib / SWAP_GIB_PER_S


MODELS = (
    SharingModel(name="a", share=0.488, weights_gib=22.0),
    SharingModel(name="b", share=0.238, weights_gib=38.0),
    SharingModel(name="c", share=0.149, weights_gib=22.0),
    SharingModel(name="d", share=0.125, weights_gib=38.0),
)
"""The shares are those of the four most used models of the public trace (``traces/gentd26.csv``) among themselves."""


class ModelRequest(NamedTuple):
    """A request of the trace, for one of several models."""

    at_s: float
    size: str
    model: str


def with_models(
    pictures: Iterable[Picture], models: Sequence[SharingModel] = MODELS, seed: int = 1
) -> list[ModelRequest]:
    """Return the requests, each with a random model by the models' shares."""
    random, names, shares = Random(seed), [model.name for model in models], [model.share for model in models]
    return [ModelRequest(one.at_s, one.size, *random.choices(names, shares)) for one in pictures]


class Turns(Protocol):
    """Decides which models are awake."""

    def decide(self, gangs: Mapping[str, JobReplica], awake: frozenset[str], now_s: float) -> frozenset[str]:
        """Return the models that are to be awake."""
        ...

    def moved(self, name: str, *, is_awake: bool, now_s: float) -> None:
        """Record that a model is awake, or asleep."""
        ...

    def next_s(self, now_s: float) -> float | None:
        """Return the seconds until a decision may change by time alone; None if it does not."""
        ...


class ByArbiter:
    """Troupe's own: the ``Arbiter`` that a share group asks."""

    def __init__(self, models: Sequence[SharingModel]) -> None:
        self._arbiter = Arbiter({"gpu": int(USABLE_GIB * GIB)})
        self.decisions_ms: list[float] = []
        """CPU time of each decision."""
        for model in models:
            awake = {"gpu": int((model.weights_gib + BESIDE_GIB) * GIB)}
            asleep = {"gpu": int(ASLEEP_GIB * GIB)}
            self._arbiter.add(Sharer(name=model.name, awake=awake, asleep=asleep, swap_s=2 * model.move_s))

    def decide(self, gangs: Mapping[str, JobReplica], awake: frozenset[str], now_s: float) -> frozenset[str]:
        """See ``Turns.decide``."""
        for name, gang in gangs.items():
            ending_s = gang.first.left_s if gang.first is not None and name in awake else None
            self._arbiter.hear(name, Demand(backlog_s=gang.load().backlog_s, ending_s=ending_s), now_s)
        begin_s = time.thread_time()
        wanted = self._arbiter.decide(now_s)
        self.decisions_ms.append(1e3 * (time.thread_time() - begin_s))
        return wanted

    def moved(self, name: str, *, is_awake: bool, now_s: float) -> None:
        """See ``Turns.moved``."""
        self._arbiter.moved(name, is_awake=is_awake, now_s=now_s)

    def next_s(self, now_s: float) -> float | None:
        """See ``Turns.next_s``."""
        return self._arbiter.next_s(now_s)


class ByArrival:
    """One model at a time: that of the oldest open request."""

    def decide(self, gangs: Mapping[str, JobReplica], awake: frozenset[str], now_s: float) -> frozenset[str]:
        """See ``Turns.decide``."""
        oldest = {name: min(gang.jobs) for name, gang in gangs.items() if gang.jobs}
        return frozenset({min(oldest, key=lambda name: oldest[name])}) if oldest else awake

    def moved(self, name: str, *, is_awake: bool, now_s: float) -> None:
        """See ``Turns.moved``."""

    def next_s(self, now_s: float) -> float | None:
        """See ``Turns.next_s``."""
        return None


class AllAwake(ByArrival):
    """No turns: every model has GPUs of its own."""

    def decide(self, gangs: Mapping[str, JobReplica], awake: frozenset[str], now_s: float) -> frozenset[str]:
        """See ``Turns.decide``."""
        return frozenset(gangs)


class _Swap(NamedTuple):
    leaving: frozenset[str]
    coming: frozenset[str]
    end_s: float


@dataclass(slots=True)
class SharedGpus:
    """One gang a model, all on the same ``num_ranks`` GPUs. Gangs that work at one time share the GPUs' time."""

    models: Sequence[SharingModel]
    num_ranks: int
    turns: Turns
    latencies_s: list[tuple[str, float]] = field(default_factory=list)
    """Size of each picture, and the seconds from its request to its last step."""
    num_swaps: int = 0
    swap_s: float = 0.0
    """Time in which a model went to sleep or woke up."""
    now_s: float = 0.0
    _gangs: dict[str, JobReplica] = field(default_factory=dict)
    _awake: frozenset[str] = frozenset()
    _swap: _Swap | None = None

    def run(self, requests: Iterable[ModelRequest]) -> None:
        """Run all requests to the last picture."""
        node = ClusterNode(0.0, 0.0)
        for number, model in enumerate(self.models):
            step_s = {size: by_size[self.num_ranks] for size, by_size in STEPS.items()}
            self._gangs[model.name] = JobReplica(model.name, number, node, step_s, 0.0)
        self._decide()
        for number, request in enumerate(requests):
            while (change_s := self._change_s()) < request.at_s:
                self._advance(change_s)
            self._advance(request.at_s)
            lone_s = NUM_STEPS * STEPS[request.size][self.num_ranks]
            job = PictureJob(number, request.size, NUM_STEPS, lone_s, request.at_s)
            self._gangs[request.model].take(job)
            self._decide()
        while (change_s := self._change_s()) < math.inf:
            self._advance(change_s)

    @property
    def _working(self) -> list[JobReplica]:
        leaving = self._swap.leaving if self._swap is not None else frozenset()
        return [gang for name, gang in self._gangs.items() if gang.jobs and name in self._awake - leaving]

    def _change_s(self) -> float:
        """Return when the state changes next without a request; infinity if it does not."""
        working = self._working
        changes_s = [self.now_s + len(working) * gang.first.left_s for gang in working if gang.first is not None]
        if self._swap is not None:
            changes_s.append(self._swap.end_s)
        elif (look_s := self.turns.next_s(self.now_s)) is not None:
            changes_s.append(self.now_s + look_s)
        return min(changes_s, default=math.inf)

    def _advance(self, to_s: float) -> None:
        working, by_s, self.now_s = self._working, to_s - self.now_s, to_s
        for gang in working:
            done = gang.advance(gang.now_s + by_s / len(working))  # its own clock goes on while it works
            self.latencies_s += ((job.size, to_s - job.arrived_s) for job in done)
        if self._swap is not None and to_s >= self._swap.end_s:
            self._end_swap(self._swap)
        self._decide()

    def _decide(self) -> None:
        if self._swap is not None:
            return
        wanted = self.turns.decide(self._gangs, self._awake, self.now_s)
        leaving, coming = self._awake - wanted, wanted - self._awake
        if leaving or coming:
            moves_s = {model.name: model.move_s for model in self.models}
            took_s = sum(max(map(moves_s.__getitem__, names), default=0.0) for names in (leaving, coming))
            self._swap = _Swap(leaving, coming, self.now_s + took_s)
            self.num_swaps, self.swap_s = self.num_swaps + 1, self.swap_s + took_s

    def _end_swap(self, swap: _Swap) -> None:
        self._swap, self._awake = None, (self._awake - swap.leaving) | swap.coming
        for name in swap.leaving | swap.coming:
            self.turns.moved(name, is_awake=name in swap.coming, now_s=self.now_s)
