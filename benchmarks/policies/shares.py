"""What each owner of requests had of a gang: how long it waited, and its share while all owners had work there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from statistics import fmean
from typing import Any

from benchmarks.load.owner import Owner
from benchmarks.policies.simulation import Span

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A request of ``owner`` that came ``at_s`` and was answered at ``end_s``; alone it takes ``lone_s``. ``steps`` is
    when ranks were at work for it."""

    owner: Owner
    at_s: float
    end_s: float
    lone_s: float
    steps: Sequence[Span]

    @property
    def wait_s(self) -> float:
        return self.end_s - self.at_s - self.lone_s

    @property
    def in_gang(self) -> Interval:
        """From when it came to the end of its steps."""
        return self.at_s, self.steps[-1].end_s if self.steps else self.end_s


def shares(requests: Sequence[Served]) -> dict[str, Any]:
    """Of one gang, by owner. ``share`` is of the seconds of ranks while all have work, which a fair gang makes equal to
    ``weight_share``; that was so for ``all_have_work_s``."""
    own = {
        owner: [one for one in requests if one.owner == owner]
        for owner in sorted({one.owner for one in requests}, key=lambda owner: owner.name)
    }
    together = reduce(_common, (_union(one.in_gang for one in mine) for mine in own.values())) if own else []
    rank_s = {owner: _rank_s(mine, together) for owner, mine in own.items()}
    weights, all_s = sum(owner.weight for owner in own), sum(rank_s.values())
    return {
        "all_have_work_s": round(sum(end_s - begin_s for begin_s, end_s in together), 2),
        "owners": {
            owner.name: {
                "requests": len(mine),
                "mean_wait_s": round(fmean(one.wait_s for one in mine), 3),
                "weight_share": round(owner.weight / weights, 4),
                "share": round(rank_s[owner] / all_s, 4) if all_s else None,
            }
            for owner, mine in own.items()
        },
    }


def _rank_s(requests: Iterable[Served], within: Sequence[Interval]) -> float:
    """Seconds of ranks in those intervals; a span that lies in one by half counts by half."""
    begins_s = [begin_s for begin_s, _ in within]
    before_s = [0.0, *accumulate(end_s - begin_s for begin_s, end_s in within)]

    def passed_s(at_s: float) -> float:
        number = bisect_right(begins_s, at_s)
        return before_s[number] - max(0.0, within[number - 1][1] - at_s) if number else 0.0

    spans = (span for one in requests for span in one.steps if span.end_s > span.begin_s)
    return sum(
        span.rank_s * (passed_s(span.end_s) - passed_s(span.begin_s)) / (span.end_s - span.begin_s) for span in spans
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns intervals that have nothing in common, in order."""
    found: list[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if found and begin_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((begin_s, end_s))
    return found


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns where both are, of two rows of intervals in order."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        begin_s, end_s = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin_s < end_s:
            found.append((begin_s, end_s))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def told(by_model: Mapping[str, Mapping[str, Any]]) -> str:
    """For people: how long each owner waited, and its share beside what its weight says."""
    parts = []
    for model, found in by_model.items():
        for name, one in found["owners"].items():
            of = "" if one["share"] is None else f"{100 * one['share']:.0f} of {100 * one['weight_share']:.0f} %"
            parts.append(f"{name} of {model} waits {one['mean_wait_s']:.2f} s, has {of or 'nothing beside all others'}")
    return "; ".join(parts)
