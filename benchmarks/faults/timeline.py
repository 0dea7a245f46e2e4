"""Timeline of a recovery from the application's log lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engines.core import logs

Record = Mapping[str, Any]
"""A log line."""

GANG_PHASES = ("processes", "connect", "load", "build")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A part of a recovery, in seconds after the fault."""

    what: str
    from_s: float
    until_s: float

    @property
    def took_s(self) -> float:
        return self.until_s - self.from_s


def records_of(logs: Path) -> list[Record]:
    """Return the structured lines of all processes in a Ray session's folder ``logs``, by time."""
    found = []
    for file in logs.rglob("worker-*.err"):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):
                found.append(json.loads(line))
    return sorted(found, key=seconds)


def rank_pids(logs: Path, model: str) -> list[int]:
    """Return the process ids of the ranks of ``model``'s newest gang. RuntimeError if none was ready."""
    for record in reversed(records_of(logs)):
        if (record["message"], record.get("model")) == ("gang is ready", model):
            return list(record["pids"])
    raise RuntimeError(f"no gang of {model} was ready, by the logs in {logs}")


def seconds(record: Record) -> float:
    """Return the Unix time of a line."""
    return datetime.fromisoformat(record["time"]).timestamp()


def spans(records: Iterable[Record], model: str, fault_s: float, first_step_s: float, end_s: float) -> list[Span]:
    """Return the parts of the recovery of ``model``'s gang in order, from ``fault_s`` to the last step at ``end_s``.

    ``first_step_s`` is the request's first step in the new gang. All times are Unix times. ``records`` are sorted.
    ValueError if a line that every recovery has is missing.
    """
    after = [record for record in records if fault_s < seconds(record) < end_s]
    ends: dict[str, float] = {
        "until the request knows that its gang is lost": _time_of(
            after, lambda record: "lost its gang" in record["message"]
        )
    }
    ends["until Serve has another replica, with its imports"] = seconds(_phase(after, "replica: process", model))
    for phase in GANG_PHASES:
        ends[f"gang: {phase}"] = seconds(_phase(after, f"gang: {phase}", model))
    ends["until the request's first step is seen again"] = first_step_s
    ends["all other steps"] = end_s
    return list(_one_after_the_other(ends, fault_s))


def inside(records: Iterable[Record], fault_s: float, end_s: float) -> dict[str, float]:
    """Return the duration of each phase of ranks, on the slowest rank."""
    slowest: dict[str, float] = {}
    for record in records:
        if record["message"] == logs.MESSAGE and fault_s < seconds(record) < end_s and "rank" in record:
            slowest[record["phase"]] = max(record["took_s"], slowest.get(record["phase"], 0.0))
    return slowest


def _one_after_the_other(ends: Mapping[str, float], fault_s: float) -> Iterator[Span]:
    from_s = 0.0
    for what, end_s in ends.items():
        until_s = max(from_s, end_s - fault_s)
        yield Span(what=what, from_s=from_s, until_s=until_s)
        from_s = until_s


def _phase(records: Iterable[Record], phase: str, model: str) -> Record:
    return _first(records, lambda one: (one.get("phase"), one.get("model")) == (phase, model), f"the phase {phase}")


def _time_of(records: Iterable[Record], holds: Callable[[Record], bool]) -> float:
    return seconds(_first(records, holds, "a request that lost its gang"))


def _first(records: Iterable[Record], holds: Callable[[Record], bool], what: str) -> Record:
    for record in records:
        if holds(record):
            return record
    raise ValueError(f"the log says nothing of {what} after the fault")
