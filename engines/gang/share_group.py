"""Models that share GPUs: the states of their processes, the next one to load, and the ones to be awake. Pure.

Everything it knows comes with the next report of each process, so a new one continues where an old one ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engines.core.resources import MemoryUse
from engines.gang.arbiter import IDLE, Arbiter, Demand, Sharer

State = Literal["waiting", "loading", "awake", "asleep"]
"""A process waits for its turn to load, loads, and is then awake or asleep."""
GANG = "denoiser"
"""The stage whose processes are the ranks of a gang."""
PROCESS_BYTES = 6 * 2**30 // 10
"""Memory of a process on its GPU beside PyTorch's: a CUDA context took 0.6 GiB on an H100."""
USABLE = 0.95
"""Share of a GPU's memory that is distributed; the rest is a reserve against fragmentation."""
SILENT_S = 15.0
"""A process that reports nothing for this long is gone."""
REPLACED_SILENT_S = 4.0
"""The same for one that was replaced: it probably died before. Processes report every two seconds."""
LOAD_PAUSE_S = 10.0
"""Models with work are left alone for this long between two loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareReport:
    """The state of one deployment of a model: a gang, an encoder or a decoder."""

    model: str
    """The model's name."""
    stage: str
    """"denoiser", "text_encoder" or "decoder"."""
    token: str
    """Distinguishes a new process from the one that it replaces."""
    state: State
    """State that it is in."""
    uses: tuple[MemoryUse, ...] = ()
    """Memory of each process, ranks in order; empty until loaded."""
    demand: Demand = IDLE
    """Its work, under way and waiting."""
    swap_s: float | None = None
    """Measured seconds of its last sleep and its last wake-up together."""
    pinned: tuple[int, ...] | None = None
    """Host memory that it was allowed to pin; None asks for it, for the weights of ``uses``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOrder:
    """Order of a group to a deployment."""

    state: State
    """The state to reach."""
    pinned: tuple[int, ...] | None = None
    """Host memory that each process may pin; None until it has loaded, or without a limit."""
    wake_s: float = 0.0
    """Predicted seconds until the model is awake, if it has work from now on; 0 if it is awake. For denoisers."""


@dataclass(kw_only=True, slots=True)
class _Member:
    """A deployment as its group knows it."""

    report: ShareReport
    """Its last report."""
    heard_s: float
    """Time of that report."""
    asked_s: float
    """Time at which it requested its turn to load."""
    beside: dict[str, int] = field(default_factory=dict)
    """Most memory beside weights that a report saw, by device."""
    peak: dict[str, int] = field(default_factory=dict)
    """Most memory beside weights at any time, by device."""
    left: dict[str, int] | None = None
    """Memory beside weights while asleep, by device; None before the first sleep."""

    def hear(self, report: ShareReport, now_s: float) -> None:
        self.report, self.heard_s = report, now_s
        beside = _sums(report.uses, "beside")
        self.beside = {device: max(size, self.beside.get(device, 0)) for device, size in beside.items()}
        self.peak = _sums(report.uses, "peak")
        if report.state == "asleep":
            self.left = beside


class ShareGroup:
    """The processes of models that share GPUs. ``memory_bytes`` is the usable memory of each device (None: measured).

    ``host_bytes`` is the host memory that all processes may pin together (None: unlimited). Until ``quiet_until_s``, no
    model loads or wakes up: processes that an earlier group let onto the devices may not have reported yet.
    """

    def __init__(
        self, *, memory_bytes: int | None = None, host_bytes: int | None = None, quiet_until_s: float = -math.inf
    ) -> None:
        self._memory_bytes, self._host_bytes = memory_bytes, host_bytes
        self._quiet_until_s = quiet_until_s
        self._members: dict[tuple[str, str], _Member] = {}
        self._replaced: dict[str, _Member] = {}
        """Processes that end while their successors are members, by token. They keep their states."""
        self._arbiter = Arbiter({})
        self._pinned: dict[str, tuple[int, ...]] = {}
        """Granted host memory by token."""
        self._loading: str | None = None
        self._load_from_s = -math.inf
        self._target: frozenset[str] = frozenset()

    def hear(self, report: ShareReport, now_s: float) -> ShareOrder:
        """Take note of a report and return the current order for its sender.

        ValueError if the model cannot share these devices.
        """
        key = (report.model, report.stage)
        known = self._members.get(key)
        if known is not None and self._was_replaced(report, known.report):
            return self._hear_replaced(report, now_s)
        if known is None or known.report.token != report.token:
            self._replaced.pop(report.token, None)  # if it was taken for the older one
            if known is not None:
                self._replaced[known.report.token] = known
                self._pinned.pop(known.report.token, None)  # until it reports again
            known = self._members[key] = _Member(report=report, heard_s=now_s, asked_s=now_s)
            if report.state == "awake":  # an arbiter before this one let it
                self._target |= {report.model}
            self._pinned = {token: sizes for token, sizes in self._pinned.items() if token in self._tokens()}
        known.hear(report, now_s)
        if report.pinned is not None:
            self._pinned[report.token] = report.pinned
        if report.uses:
            self._check_devices(report)
            if report.pinned is None:
                self.grant(report.token, [use.weights for use in report.uses])
        self._update(report.model, now_s)
        self.settle(now_s)
        return self.order(report, now_s)

    def _was_replaced(self, report: ShareReport, newest: ShareReport) -> bool:
        """Return whether the sender of ``report`` is older than the member: that one has yet to load."""
        is_older = newest.state in ("waiting", "loading") and report.state in ("awake", "asleep")
        return report.token in self._replaced or (report.token != newest.token and is_older)

    def _hear_replaced(self, report: ShareReport, now_s: float) -> ShareOrder:
        member = _Member(report=report, heard_s=now_s, asked_s=now_s)
        self._replaced.setdefault(report.token, member).hear(report, now_s)
        if report.pinned is not None:
            self._pinned[report.token] = report.pinned
        self.settle(now_s)
        return self.order(report, now_s)

    def forget(self, token: str, now_s: float) -> None:
        """Drop a process that ends."""
        self._replaced.pop(token, None)
        for key in [key for key, one in self._members.items() if one.report.token == token]:
            del self._members[key]
            self._update(key[0], now_s)
        self._pinned.pop(token, None)
        self.settle(now_s)

    def grant(self, token: str, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Grant a deployment host memory for weights of ``sizes`` in place of what it had. None is no limit."""
        if self._host_bytes is None:
            return None
        others = sum(sum(pinned) for other, pinned in self._pinned.items() if other != token)
        share = min(1.0, max(0, self._host_bytes - others) / max(1, sum(sizes)))
        self._pinned[token] = tuple(int(share * size) for size in sizes)
        return self._pinned[token]

    def settle(self, now_s: float) -> None:
        """Drop silent processes, then decide anew unless a swap is under way."""
        for key, member in [*self._members.items()]:
            if now_s - member.heard_s > SILENT_S:
                del self._members[key]
                self._pinned.pop(member.report.token, None)
                self._update(key[0], now_s)
        for token, member in [*self._replaced.items()]:
            if now_s - member.heard_s > REPLACED_SILENT_S:
                del self._replaced[token]
                self._pinned.pop(token, None)
        if now_s < self._quiet_until_s:
            return
        self._choose_loading(now_s)
        if self._loading is None and self._is_settled():
            self._target = self._arbiter.decide(now_s)

    def order(self, report: ShareReport, now_s: float) -> ShareOrder:
        """Return the state that the sender of ``report`` is to reach."""
        foresees = report.stage == GANG and report.model in self._arbiter.sharers
        wake_s = self._arbiter.wake_s(report.model, now_s, self._target) if foresees else 0.0
        return ShareOrder(state=self._state(report), pinned=self._pinned.get(report.token), wake_s=wake_s)

    def next_s(self, now_s: float) -> float | None:
        """Return the seconds until orders may change by time alone; None if they do not."""
        if any(member.report.state == "waiting" for member in self._members.values()):
            return 0.5
        next_s = self._arbiter.next_s(now_s)
        return next_s if now_s >= self._quiet_until_s else min(next_s or math.inf, self._quiet_until_s - now_s)

    @property
    def has_work(self) -> bool:
        return any(member.report.demand.backlog_s for member in self._members.values())

    @property
    def is_empty(self) -> bool:
        return not self._members

    @property
    def awake(self) -> tuple[str, ...]:
        """Models whose weights are on the devices."""
        return tuple(sorted({one.report.model for one in self._members.values() if one.report.state == "awake"}))

    @property
    def pinned_bytes(self) -> int:
        """Host memory that was granted."""
        return sum(map(sum, self._pinned.values()))

    def _state(self, report: ShareReport) -> State:
        model = report.model
        if report.token in self._replaced:
            return report.state
        if report.state in ("waiting", "loading"):
            may_load = self._loading == model and self._all_asleep(self._others(model))
            return "loading" if may_load or report.state == "loading" else "waiting"
        if self._loading is not None:
            return "awake" if self._loading == model else "asleep"
        if model not in self._target:
            return "asleep"
        if report.state == "awake":
            return "awake"
        return "awake" if self._all_asleep(self._leaving()) and not self._may_wait(report) else "asleep"

    def _may_wait(self, report: ShareReport) -> bool:
        """Return whether a stage without work lets the gang of its model, which has some, wake up first.

        Both copies take one bus. An encoder has no work if its cache has the conditioning.
        """
        if report.stage == GANG or report.demand.backlog_s:
            return False
        gang = self._members.get((report.model, GANG))
        return gang is not None and gang.report.state == "asleep" and gang.report.demand.backlog_s > 0

    # Loads: one model at a time, alone on its devices, since its memory is not known before.

    def _choose_loading(self, now_s: float) -> None:
        waiting = [one for one in self._members.values() if one.report.state == "waiting"]
        if self._loading is not None and not any(
            one.report.state in ("waiting", "loading") for one in self._of(self._loading)
        ):
            self._loading, self._load_from_s = None, now_s + LOAD_PAUSE_S
            self._target = self._awake_now()
        if self._loading is None and waiting and (now_s >= self._load_from_s or not self.has_work):
            self._loading = min(waiting, key=lambda one: one.asked_s).report.model

    # Memory.

    def _update(self, model: str, now_s: float) -> None:
        """Pass what the processes of ``model`` reported to the arbiter."""
        ready = [one for one in self._of(model) if one.report.uses]
        if not ready:
            self._arbiter.remove(model)
            return
        awake: dict[str, int] = {}
        asleep: dict[str, int] = {}
        working: dict[str, int] = {}
        for one in ready:
            weights = _sums(one.report.uses, "weights")
            for device, beside in one.beside.items():
                left = beside if one.left is None else one.left.get(device, 0)
                process = 0 if device == "cpu" else PROCESS_BYTES * sum(use.device == device for use in one.report.uses)
                awake[device] = awake.get(device, 0) + weights[device] + beside + process
                asleep[device] = asleep.get(device, 0) + left + process
                working[device] = working.get(device, 0) + max(0, one.peak[device] - beside)
        known = self._arbiter.sharers.get(model)
        if known is None:
            self._arbiter.add(Sharer(name=model, awake=awake, asleep=asleep, working=working))
        else:
            known.awake, known.asleep, known.working = awake, asleep, working
        swaps_s = [one.report.swap_s for one in ready if one.report.swap_s is not None]
        is_awake = any(one.report.state == "awake" for one in ready)
        self._arbiter.moved(model, is_awake=is_awake, now_s=now_s, swap_s=max(swaps_s, default=None))
        self._arbiter.hear(model, Demand.total(one.report.demand for one in ready), now_s)

    def _check_devices(self, report: ShareReport) -> None:
        """Record the devices' memory; ValueError if ranks of two models are not on the same devices."""
        for use in report.uses:
            own = int(USABLE * use.device_bytes) if use.device_bytes else None
            limits = [size for size in (own, self._memory_bytes) if size is not None]
            self._arbiter.capacity[use.device] = min(limits, default=2**62)
        devices = [use.device for use in report.uses]
        for other in self._members.values():
            theirs = [use.device for use in other.report.uses]
            num = min(len(devices), len(theirs))
            if other.report.stage == report.stage == GANG and devices[:num] != theirs[:num]:
                raise ValueError(
                    f"the ranks of {report.model} are on {', '.join(devices)} and those of {other.report.model} on "
                    f"{', '.join(theirs)}: models that share GPUs must be on the same ones"
                )

    # Members.

    def _is_settled(self) -> bool:
        return self._awake_now() == self._target & self._arbiter.sharers.keys() and self._all_asleep(self._leaving())

    def _awake_now(self) -> frozenset[str]:
        """Return the models all of whose loaded processes are awake."""
        models = {model for model, _ in self._members}
        loaded = {model: [one for one in self._of(model) if one.report.uses] for model in models}
        return frozenset(
            model for model, ones in loaded.items() if ones and all(one.report.state == "awake" for one in ones)
        )

    def _leaving(self) -> list[_Member]:
        return [
            *self._replaced.values(),
            *(one for one in self._members.values() if one.report.model not in self._target),
        ]

    def _others(self, model: str) -> list[_Member]:
        return [*self._replaced.values(), *(one for one in self._members.values() if one.report.model != model)]

    def _of(self, model: str) -> Iterator[_Member]:
        return (one for one in self._members.values() if one.report.model == model)

    def _tokens(self) -> set[str]:
        return {one.report.token for one in self._members.values()} | self._replaced.keys()

    def _all_asleep(self, members: Sequence[_Member]) -> bool:
        """Return whether none of ``members`` holds memory of a device."""
        return all(one.report.state in ("asleep", "waiting") for one in members)


def _sums(uses: Sequence[MemoryUse], name: Literal["weights", "beside", "peak"]) -> dict[str, int]:
    """Return the sum of a field by device."""
    devices = dict.fromkeys(use.device for use in uses)
    return {device: sum(getattr(use, name) for use in uses if use.device == device) for device in devices}
