"""Open jobs of a gang in predicted seconds, and when a further one would be done. Pure: no Ray, no clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

REPORT_EVERY_S = 1.0
"""Interval of a gang's reports to routers."""
REPLICAS_PER_REPORT_S = 50
"""Gangs of a model that report in one second, at most."""

SAME_SHARE, SAME_S = 0.1, 0.01
"""Open jobs with this much more work left than a new one count as equal, and run before it.

Predicted times of steps are corrected by steps of a tenth (``MIN_CHANGE``), and reports are rounded."""


class OpenWork(NamedTuple):
    """A job of a gang."""

    left_s: float
    """Predicted seconds that it still takes on the whole gang."""
    urgency_s: float
    """The same by priority, as ``Shortest`` orders jobs."""


class NewWork(NamedTuple):
    """A request that looks for a gang."""

    kind: str
    """Jobs of one kind have steps of one time: size, branches, adapters."""
    num_steps: int
    priority: float = 1.0
    adapters: str = ""
    """Adapters with their weights, which the gang adds to its own."""
    last_kind: str = ""
    """Kind of the steps at its end, if they are of another one."""
    num_last: int = 0
    """Number of these steps, which ``num_steps`` has too."""

    def steps_s(self, step_s: Mapping[str, float]) -> float | None:
        """Return the seconds of its steps by those of each kind; None if one is not known."""
        first_s = step_s.get(self.kind)
        if not self.num_last or first_s is None:
            return None if first_s is None else self.num_steps * first_s
        last_s = step_s.get(self.last_kind)
        return None if last_s is None else (self.num_steps - self.num_last) * first_s + self.num_last * last_s


@dataclass(frozen=True, kw_only=True, slots=True)
class GangLoad:
    """Knowledge of a router about a gang."""

    jobs: Mapping[str, OpenWork] = field(default_factory=dict)
    """Open jobs by id."""
    step_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted step time by kind of job, for kinds that the gang has run: it is warm for these."""
    cold_s: float = 0.0
    """Time that the first job of a kind took longer than its steps; 0 until measured."""
    by_urgency: bool = True
    """True if shorter jobs overtake longer ones; False: jobs run in order of arrival."""
    wake_s: float = 0.0
    """Predicted seconds until the weights are on the devices; 0 if they are."""
    adapters: str = ""
    """Adapters in the weights after the step that was planned last, as in ``NewWork``."""
    switch_s: float = 0.0
    """Predicted seconds of a change to other ones."""
    backlog_s: float = field(init=False, compare=False)
    """Predicted seconds until all open jobs are done."""
    urgencies_s: Sequence[float] = field(init=False, repr=False, compare=False)
    """The jobs' urgencies, in order."""
    left_sums_s: Sequence[float] = field(init=False, repr=False, compare=False)
    """Seconds left of none, one, two ... of the most urgent jobs together."""

    def __post_init__(self) -> None:
        """Add up the jobs once, since a router asks for each request."""
        ordered = sorted(self.jobs.values(), key=attrgetter("urgency_s"))
        left_s = [*accumulate((one.left_s for one in ordered), initial=0.0)]
        object.__setattr__(self, "urgencies_s", [one.urgency_s for one in ordered])
        object.__setattr__(self, "left_sums_s", left_s)
        object.__setattr__(self, "backlog_s", left_s[-1])

    def to_stats(self) -> dict[str, Any]:
        """Return the fields as JSON values, rounded so that equal states are equal."""
        return {
            "jobs": {job_id: [round(one.left_s, 2), round(one.urgency_s, 2)] for job_id, one in self.jobs.items()},
            "step_s": {kind: round(step_s, 5) for kind, step_s in self.step_s.items()},
            "cold_s": round(self.cold_s, 2),
            "by_urgency": self.by_urgency,
            "wake_s": round(self.wake_s, 1),
            "adapters": self.adapters,
            "switch_s": round(self.switch_s, 3),
        }

    @classmethod
    def of_stats(cls, stats: Mapping[str, Any]) -> GangLoad:
        """Return the load of ``to_stats``."""
        jobs = {job_id: OpenWork(*work) for job_id, work in stats["jobs"].items()}
        return cls(
            jobs=jobs,
            step_s=stats["step_s"],
            cold_s=stats["cold_s"],
            by_urgency=stats["by_urgency"],
            wake_s=stats.get("wake_s", 0.0),  # these are missing in reports of an earlier version
            adapters=stats.get("adapters", ""),
            switch_s=stats.get("switch_s", 0.0),
        )


class Choice(NamedTuple):
    """A gang for a request. Better ones compare as less."""

    finish_10ms: int
    backlog_10ms: int
    """Open work of the gang before it."""
    place: int
    """Place of the gang among the others."""
    name: str
    finish_s: float
    """Predicted seconds until the request is done."""
    own_s: float
    """Seconds of the request alone."""


def rank_gangs(
    loads: Mapping[str, GangLoad],
    new: NewWork,
    ages_s: Mapping[str, float] | None = None,
    sent: Mapping[str, Collection[OpenWork]] | None = None,
) -> list[Choice]:
    """Return the gangs by predicted finish of ``new``, the first one first; [] if nothing is known of its kind.

    Ties within 10 ms go to the gang with less work, then to the earlier one in ``loads``, so the last gang can become
    idle. ``ages_s``: age of a gang's report; ``sent``: jobs that were sent to a gang since.
    """
    heard_s = {name: -(ages_s or {}).get(name, 0.0) for name in loads}
    return [Choice(*one) for one in _ranked([*loads], loads, heard_s, 0.0, new, sent or {})]


def _ranked(
    names: Sequence[str],
    loads: Mapping[str, GangLoad],
    heard_s: Mapping[str, float],
    now_s: float,
    new: NewWork,
    sent: Mapping[str, Collection[OpenWork]],
) -> list[tuple[int, int, int, str, float, float]]:
    """Return the fields of ``rank_gangs`` for reports of the times ``heard_s``.

    Models may have hundreds of gangs: it avoids calls and objects.
    """
    adapters, priority = new.adapters, new.priority
    known_s = [new.steps_s(loads[name].step_s) for name in names]
    if (usual_s := next((one for one in known_s if one is not None), None)) is None:
        return []
    ranked = []
    for place, (name, steps_s) in enumerate(zip(names, known_s, strict=True)):
        load = loads[name]
        backlog_s = load.backlog_s
        if steps_s is None:
            own_s = usual_s + load.cold_s
        else:
            own_s = steps_s + (load.switch_s if adapters != load.adapters else 0.0)
        urgency_s = (1 + SAME_SHARE) * own_s / priority + SAME_S if load.by_urgency else math.inf
        wait_s = load.wake_s - now_s + heard_s[name]
        if backlog_s:
            wait_s += load.left_sums_s[bisect_right(load.urgencies_s, urgency_s)]
        finish_s = wait_s + own_s if wait_s > 0 else own_s
        if sent and (beside := sent.get(name)):
            for one in beside:
                backlog_s += one.left_s
                if one.urgency_s <= urgency_s:
                    finish_s += one.left_s
        ranked.append((int(100 * finish_s + 0.5), int(100 * backlog_s + 0.5), place, name, finish_s, own_s))
    ranked.sort()
    return ranked


SENT_MEMORY_S = 1.0
"""A report that comes this long after a job was sent includes the job, if it is not done yet."""


class LoadBoard:
    """Newest reports of a model's gangs, and the jobs that were sent to them since."""

    def __init__(self) -> None:
        self._loads: dict[str, GangLoad] = {}
        self._heard_s: dict[str, float] = {}
        self._stats: dict[str, Mapping[str, Any]] = {}
        self._sent: dict[str, dict[str, tuple[float, OpenWork]]] = {}

    def hear(self, stats: Mapping[str, Mapping[str, Any]], now_s: float) -> None:
        """Take the newest reports (``GangLoad.to_stats``) of all gangs; an empty one is not known yet."""
        for name in [name for name in self._loads if not stats.get(name)]:
            del self._loads[name], self._heard_s[name], self._stats[name]
            self._sent.pop(name, None)
        for name in [name for name in self._sent if name not in stats]:  # it ended before its first report
            del self._sent[name]
        for name, newest in stats.items():
            if newest and newest != self._stats.get(name):
                self._loads[name], self._heard_s[name], self._stats[name] = GangLoad.of_stats(newest), now_s, newest
                sent = self._sent.get(name, {})
                self._sent[name] = {job_id: one for job_id, one in sent.items() if now_s - one[0] < SENT_MEMORY_S}

    def choose(self, names: Sequence[str], job_id: str, new: NewWork, now_s: float) -> list[str]:
        """Return ``names`` by predicted finish of ``new``, and assume that the first one gets it; [] if unknown."""
        if not self._loads.keys() >= set(names):
            return []
        sent = {name: self._unreported(name, self._sent[name], now_s) for name in names if self._sent.get(name)}
        ranked = _ranked(names, self._loads, self._heard_s, now_s, new, sent)
        if ranked:
            *_, first, _, own_s = ranked[0]
            self._sent.setdefault(first, {})[job_id] = now_s, OpenWork(own_s, own_s / new.priority)
        return [one[3] for one in ranked]

    def _unreported(self, name: str, sent: dict[str, tuple[float, OpenWork]], now_s: float) -> list[OpenWork]:
        """Return the jobs of ``sent`` that neither the gang's report has nor time has ended. Forget the others."""
        reported, since_s = self._loads[name].jobs, now_s - SENT_MEMORY_S
        gone = [job_id for job_id, (at_s, one) in sent.items() if at_s + one.left_s < since_s]
        for job_id in gone:
            del sent[job_id]
        return [one for job_id, (_, one) in sent.items() if job_id not in reported]

    def confirm(self, name: str, job_id: str) -> None:
        """Record which gang has got a job."""
        for other, jobs in list(self._sent.items()):
            if other != name and job_id in jobs:
                self._sent.setdefault(name, {})[job_id] = jobs.pop(job_id)
