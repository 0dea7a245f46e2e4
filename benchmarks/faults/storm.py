"""The storm: turns of clients one after the other, some at a time, and a summary of their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.faults.clients import LONGEST_PAUSE_S, Clients, Outcome
from benchmarks.faults.visits import BODIES, Kind, Turn, Visit

CARRIERS = ("ingress", "proxy")
"""Processes that carry a connection: it is cut when one of them dies. A stopped one dies at its next health check."""
CARRIER_DIES_WITHIN_S = 60.0
IN_PEACE: tuple[Kind, ...] = ("picture", "edit", "clip")
"""Kinds that together ask for each body once: ``stream`` and ``sync`` give the same bytes."""
PICTURE_TO_EDIT = 1
"""Index among the pictures."""
SAY_EVERY = 50


async def draw_references(clients: Clients) -> None:
    """Ask for everything once while all is well. RuntimeError if something is not made."""
    for kind in IN_PEACE:
        for number in range(len(BODIES[kind])):
            outcome = await clients.visit(Visit(kind=kind, number=number, key=0))
            if outcome.end != "right":
                raise RuntimeError(f"{kind} {number} was {outcome.end} before the storm: {outcome.code} {outcome.note}")
        if kind == "picture":
            clients.source = clients.references["/v1/images/generations", PICTURE_TO_EDIT]


async def ride_out(
    clients: Clients, turns: Iterable[Turn], num_at_once: int, say: Callable[[str], None], within_s: float = math.inf
) -> list[Outcome]:
    """Return how every visit ended. ``num_at_once`` turns run at a time; none begins after ``within_s``.

    A client that is refused waits before its next turn as long as it was told, and twice as long after each further
    refusal in a row, up to ``LONGEST_PAUSE_S``.
    """
    outcomes: list[Outcome] = []
    last_s = time.monotonic() + within_s
    waiting = itertools.takewhile(lambda turn: time.monotonic() < last_s, turns)

    async def take_turns() -> None:
        num_refused = 0
        for turn in waiting:
            ended = await asyncio.gather(*(clients.visit(visit) for visit in turn))
            for outcome in ended:
                outcomes.append(outcome)
                if len(outcomes) % SAY_EVERY == 0:
                    say(f"{len(outcomes)} ended: {dict(Counter(one.end for one in outcomes))}")
            if len(ended) == 1 and ended[0].end == "refused":
                await asyncio.sleep(min(ended[0].retry_s * 2**num_refused, LONGEST_PAUSE_S))
                num_refused += 1
            else:
                num_refused = 0

    await asyncio.gather(*(take_turns() for _ in range(num_at_once)))
    return outcomes


def summary(outcomes: Sequence[Outcome], struck: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return counts, and under "lost" a line for each outcome that must not be."""
    cut_by_kill = [one for one in outcomes if one.end == "cut" and was_cut_by_kill(one, struck)]
    wrong = [one for one in outcomes if one.end in ("cut", "wrong_bytes", "no_reason", "hung")]
    right_s = sorted(one.ended_s - one.began_s for one in outcomes if one.end == "right")
    return {
        "requests": len(outcomes),
        "ends": dict(sorted(Counter(one.end for one in outcomes).items())),
        "by_kind": dict(sorted(Counter(f"{one.kind} {one.end}" for one in outcomes).items())),
        "reasons": dict(sorted(Counter(one.code for one in outcomes if one.end == "refused").items())),
        "cut_by_kill": len(cut_by_kill),
        "right_s": {
            "median": round(median(right_s), 2) if right_s else None,
            "p95": round(right_s[len(right_s) * 95 // 100], 2) if right_s else None,
        },
        "lost": [f"{one.kind} {one.end}: {one.code} {one.note}" for one in wrong if one not in cut_by_kill],
    }


def was_cut_by_kill(outcome: Outcome, struck: Sequence[tuple[float, str]]) -> bool:
    """Return whether a process that carried the connection was struck while it was open, or shortly before."""
    return any(
        kind in CARRIERS and outcome.began_s - CARRIER_DIES_WITHIN_S <= at_s <= outcome.ended_s for at_s, kind in struck
    )
