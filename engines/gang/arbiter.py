"""Decides which of the models that share GPUs are awake. Pure: no clock, no tasks, no ranks.

An awake model with work keeps its turn until the work is done, or until the turn is over and another model waits.
Swaps are never free, so a turn lasts a multiple of a swap's measured time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

DeviceBytes = Mapping[str, int]
"""Bytes by device id."""

LINGER_S = 0.25
"""An idle model is still at work for this long: a job's latents are on their way to the decoder."""
TURN_SWAPS = 4.0
"""A turn lasts this many swaps at least while another model waits, so swaps take a fifth of the time at most."""
MIN_TURN_S = 0.5
MAX_TURN_S = 10.0
"""A turn is over after this time, or after ``TURN_SWAPS`` swaps if those take longer."""
AGEING = 1.0
"""Seconds of work that a waiting model is ordered below its own, per second of waiting."""
STARVING_S = 20.0
"""Models that wait for longer come first, in order of arrival."""
USUAL_BANDWIDTH = 20e9
"""Bytes per second of a swap that was not measured yet."""
SHORTEST_S = 0.01
"""Shortest time until a decision is reconsidered."""
FORESEEN_S = 120.0
COARSE_SHARE = 1 / 32
"""A wake-up is predicted so far ahead, with decisions further apart by this share of the time ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Open work of a model, or of one of its processes."""

    backlog_s: float = 0.0
    """Predicted seconds of all open work, above 0 if there is any."""
    ending_s: float | None = None
    """Predicted seconds until the first running job is done; None if none runs."""
    slack_s: float | None = None
    """Seconds by which work may still be delayed without a missed deadline; None without deadlines."""

    @classmethod
    def total(cls, demands: Iterable[Demand]) -> Demand:
        """Return the demand of several processes of one model, which work one after the other."""
        every = [*demands]
        endings = [one.ending_s for one in every if one.ending_s is not None]
        slacks = [one.slack_s for one in every if one.slack_s is not None]
        return cls(
            backlog_s=sum(one.backlog_s for one in every),
            ending_s=min(endings, default=None),
            slack_s=min(slacks, default=None),
        )


IDLE = Demand()


@dataclass(kw_only=True, slots=True)
class Sharer:
    """A model that shares GPUs. Times are those of the caller's clock."""

    name: str
    """The model's name in the application."""
    awake: DeviceBytes
    """Memory of all its processes while it is awake, by device."""
    asleep: DeviceBytes = field(default_factory=dict)
    """The part of it that remains while it is asleep."""
    working: DeviceBytes = field(default_factory=dict)
    """Memory that its work takes at most beside ``awake``, by device."""
    swap_s: float | None = None
    """Measured seconds of going to sleep and waking up again; None before the first."""
    demand: Demand = IDLE
    """Its work, as last reported."""
    is_awake: bool = False
    """It holds its memory, at least in part."""
    waits_since_s: float | None = None
    """Time since which it is asleep and has work."""
    turn_since_s: float = -math.inf
    """Begin of the turn, which counts only while another model waits."""
    busy_s: float = -math.inf
    """Time at which it last had work."""
    usual_backlog_s: float = SHORTEST_S
    """Backlog with which its last work began."""

    @property
    def weights(self) -> Mapping[str, int]:
        """Bytes that a wake-up takes, by device."""
        return {device: size - self.asleep.get(device, 0) for device, size in self.awake.items()}

    @property
    def cost_s(self) -> float:
        """Seconds of a swap, estimated by its bytes before it was measured."""
        estimate_s = 2 * max(self.weights.values(), default=0) / USUAL_BANDWIDTH
        return estimate_s if self.swap_s is None else self.swap_s

    @property
    def min_turn_s(self) -> float:
        return max(MIN_TURN_S, TURN_SWAPS * self.cost_s)

    @property
    def grace_s(self) -> float:
        """A job that ends within this time is not interrupted."""
        return max(MIN_TURN_S, self.cost_s)

    @property
    def max_turn_s(self) -> float:
        return max(MAX_TURN_S, self.min_turn_s)


class Arbiter:
    """Decides for the models that share some GPUs. ``capacity`` is the usable memory of each device, in bytes.

    The caller reports demands and states, then follows ``decide``. Models that it omits go to sleep, and others wake
    up once there is room.
    """

    def __init__(self, capacity: DeviceBytes) -> None:
        self.capacity = dict(capacity)
        self.sharers: dict[str, Sharer] = {}

    def add(self, sharer: Sharer) -> None:
        """Add a model or replace what is known of its memory. ValueError if it does not fit its devices alone."""
        for device, size in sharer.awake.items():
            if size > self.capacity[device]:
                taken, usable = size / 2**30, self.capacity[device] / 2**30
                raise ValueError(
                    f"{sharer.name} takes {taken:.1f} GiB on {device}, of which {usable:.1f} GiB are usable: divide "
                    "its weights, or give it GPUs of its own"
                )
        self.sharers[sharer.name] = sharer

    def remove(self, name: str) -> None:
        self.sharers.pop(name, None)

    def hear(self, name: str, demand: Demand, now_s: float) -> None:
        """Take note of the open work of a model."""
        sharer = self.sharers[name]
        if demand.backlog_s or sharer.demand.backlog_s:
            sharer.busy_s = now_s
        if demand.backlog_s and not sharer.demand.backlog_s:
            sharer.usual_backlog_s = demand.backlog_s
        sharer.demand = demand
        self._note_wait(sharer, now_s)

    def moved(self, name: str, *, is_awake: bool, now_s: float, swap_s: float | None = None) -> None:
        """Take note that a model is awake (or begins to wake up), or asleep."""
        sharer = self.sharers[name]
        if is_awake and not sharer.is_awake:
            sharer.turn_since_s = sharer.busy_s = now_s
        sharer.is_awake = is_awake
        sharer.swap_s = sharer.swap_s if swap_s is None else swap_s
        self._note_wait(sharer, now_s)

    def decide(self, now_s: float) -> frozenset[str]:
        """Return the models that are to be awake."""
        wanted = {sharer.name for sharer in self.sharers.values() if sharer.is_awake}
        waiting = [one for one in self.sharers.values() if one.waits_since_s is not None]
        for sharer in sorted(waiting, key=lambda one: self._order(one, now_s)):
            victims = self._victims(sharer, wanted, now_s)
            if victims is None:
                break  # room that comes free is for this one
            wanted -= victims
            wanted.add(sharer.name)
        return frozenset(wanted)

    def next_s(self, now_s: float) -> float | None:
        """Return the seconds until a decision may change by time alone; None if no model waits."""
        if not any(one.waits_since_s is not None for one in self.sharers.values()):
            return None
        awake = [one for one in self.sharers.values() if one.is_awake]
        ends_s = [one.turn_since_s + turn_s for one in awake for turn_s in (one.min_turn_s, one.max_turn_s)]
        return min([LINGER_S, *(end_s - now_s for end_s in ends_s if end_s > now_s + SHORTEST_S)])

    def wake_s(self, name: str, now_s: float, wanted: frozenset[str]) -> float:
        """Return the predicted seconds until a model is awake, if it has work from now on; 0 if it is awake.

        ``wanted`` are the models that should be awake now. ``decide`` names the next ones, as if no further work came.
        Models that are awake share the devices' time. The result is at most ``FORESEEN_S`` and the model's wake-up.
        """
        if self.sharers[name].is_awake and name in wanted:
            return 0.0
        future = self._copy()
        at_s = now_s + future._swap(wanted, now_s)
        sharer = future.sharers[name]
        if not sharer.demand.backlog_s:
            future.hear(name, Demand(backlog_s=sharer.usual_backlog_s), at_s)
        while not sharer.is_awake:
            wanted = future.decide(at_s) if at_s - now_s < FORESEEN_S else frozenset({name})
            at_s += future._swap(wanted, at_s)
            if not sharer.is_awake:
                step_s = max(future.next_s(at_s) or LINGER_S, COARSE_SHARE * (at_s - now_s))
                at_s += step_s
                future._work(step_s, at_s)
        return at_s - now_s

    def _copy(self) -> Arbiter:
        copied = Arbiter(self.capacity)
        copied.sharers = {name: replace(sharer) for name, sharer in self.sharers.items()}
        return copied

    def _swap(self, wanted: frozenset[str], now_s: float) -> float:
        """Bring exactly ``wanted`` onto the devices. Return the seconds that it takes: half a swap each way."""
        moving = [sharer for sharer in self.sharers.values() if sharer.is_awake != (sharer.name in wanted)]
        leaving_s = max((one.cost_s / 2 for one in moving if one.is_awake), default=0.0)
        coming_s = max((one.cost_s / 2 for one in moving if not one.is_awake), default=0.0)
        for one in moving:
            self.moved(one.name, is_awake=not one.is_awake, now_s=now_s + leaving_s + coming_s)
        return leaving_s + coming_s

    def _work(self, by_s: float, now_s: float) -> None:
        """Let the models that are awake work for ``by_s``, up to ``now_s``."""
        busy = [sharer for sharer in self.sharers.values() if sharer.is_awake and sharer.demand.backlog_s]
        for one in busy:
            ending_s = None if one.demand.ending_s is None else one.demand.ending_s - by_s / len(busy)
            left_s = one.demand.backlog_s - by_s / len(busy)
            is_open = ending_s is None or ending_s > 0
            left = replace(one.demand, backlog_s=left_s, ending_s=ending_s if is_open else None)
            self.hear(one.name, left if left_s > 0 else IDLE, now_s)

    def _note_wait(self, sharer: Sharer, now_s: float) -> None:
        if sharer.is_awake or not sharer.demand.backlog_s:
            sharer.waits_since_s = None
        elif sharer.waits_since_s is None:
            sharer.waits_since_s = now_s

    def _order(self, sharer: Sharer, now_s: float) -> tuple[float, ...]:
        """Return the sort key: starving models by arrival, then deadlines in danger, then the shortest work, aged."""
        assert sharer.waits_since_s is not None
        waited_s = now_s - sharer.waits_since_s
        if waited_s >= STARVING_S:
            return (0.0, sharer.waits_since_s)
        slack_s = self._slack_s(sharer)
        if slack_s <= sharer.cost_s + self._longest_turn_s():
            return (1.0, slack_s)
        return (2.0, sharer.demand.backlog_s - AGEING * waited_s)

    def _slack_s(self, sharer: Sharer) -> float:
        return math.inf if sharer.demand.slack_s is None else sharer.demand.slack_s

    def _longest_turn_s(self) -> float:
        return max((one.max_turn_s for one in self.sharers.values() if one.is_awake), default=0.0)

    def _victims(self, sharer: Sharer, wanted: set[str], now_s: float) -> set[str] | None:
        """Return models to put to sleep for ``sharer``; None if it does not fit without one that may not."""
        victims: set[str] = set()
        awake = [self.sharers[name] for name in wanted if self.sharers[name].is_awake]
        free = [one for one in awake if self._may_sleep(one, sharer, now_s)]
        for candidate in sorted(free, key=lambda one: (one.demand.backlog_s > 0, one.busy_s, one.name)):
            lacking = self._lacking((wanted - victims) | {sharer.name})
            if not lacking:
                break
            if lacking & candidate.weights.keys():
                victims.add(candidate.name)
        return None if self._lacking((wanted - victims) | {sharer.name}) else self._needed(sharer, wanted, victims)

    def _needed(self, sharer: Sharer, wanted: set[str], victims: set[str]) -> set[str]:
        """Drop victims that turned out not to be needed, those with work first."""
        for name in sorted(victims, key=lambda one: -self.sharers[one].busy_s):
            if not self._lacking((wanted - (victims - {name})) | {sharer.name}):
                victims = victims - {name}
        return victims

    def _lacking(self, awake: set[str]) -> set[str]:
        """Return the devices whose memory does not suffice for these models awake and the others asleep.

        One model alone is always allowed: ``add`` has checked it, and what others leave is only estimated.
        """
        on_device = {device: [one for one in self._on(device) if one.name in awake] for device in self.capacity}
        return {
            device
            for device, size in self.capacity.items()
            if len(on_device[device]) > 1
            and sum(_bytes(one, device, one.name in awake) for one in self.sharers.values()) > size
        }

    def _on(self, device: str) -> list[Sharer]:
        """Return the models whose weights need memory of ``device``."""
        return [one for one in self.sharers.values() if one.weights.get(device)]

    def _may_sleep(self, sharer: Sharer, waiting: Sharer, now_s: float) -> bool:
        if not sharer.demand.backlog_s:
            return now_s >= sharer.busy_s + LINGER_S
        swaps_s = sharer.cost_s + waiting.cost_s
        is_short = waiting.demand.backlog_s + swaps_s < 0.5 * sharer.demand.backlog_s
        is_urgent = is_short or self._order(waiting, now_s)[0] < 2
        return now_s >= self._free_from_s(sharer, waiting, sharer.min_turn_s if is_urgent else sharer.max_turn_s)

    def _free_from_s(self, sharer: Sharer, waiting: Sharer, turn_s: float) -> float:
        """Return when a model with work may go to sleep for ``waiting``.

        A job that ends sooner than a swap takes may end. The time for that is given once, from the end of the turn.
        """
        assert waiting.waits_since_s is not None
        end_s, ending_s = max(sharer.turn_since_s + turn_s, waiting.waits_since_s), sharer.demand.ending_s
        return end_s + sharer.grace_s if ending_s is not None and ending_s <= sharer.grace_s else end_s


def _bytes(sharer: Sharer, device: str, is_awake: bool) -> int:
    """Return the memory that must be kept for a model: what it holds, and while it is awake what its work takes."""
    if not is_awake:
        return sharer.asleep.get(device, 0)
    return sharer.awake.get(device, 0) + sharer.working.get(device, 0)
