"""All turns from first to last, some at a time, and what they came to."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.faults.soak.clients import LONGEST_PAUSE_S, Clients, Outcome
from benchmarks.faults.soak.visits import BODIES, Kind, Turn, Visit

CARRIERS = ("ingress", "proxy")
"""What a connection goes through: it is cut when one of them dies. A stopped one dies when its health is looked at."""
CARRIER_DIES_WITHIN_S = 60.0
IN_PEACE: tuple[Kind, ...] = ("picture", "edit", "clip")
"""A request of each body; ``stream`` and ``sync`` give the same bytes."""
PICTURE_TO_EDIT = 1
"""Its number among the pictures."""
SAY_EVERY = 50


async def draw_references(clients: Clients) -> None:
    """Asks for everything once while all is well. RuntimeError if something is not made."""
    for kind in IN_PEACE:
        for number in range(len(BODIES[kind])):
            outcome = await clients.visit(Visit(kind=kind, number=number, key=0))
            if outcome.end != "right":
                raise RuntimeError(f"{kind} {number} was {outcome.end} in peace: {outcome.code} {outcome.note}")
        if kind == "picture":
            clients.source = clients.references["/v1/images/generations", PICTURE_TO_EDIT]


async def ride_out(
    clients: Clients, turns: Iterable[Turn], num_at_once: int, say: Callable[[str], None], within_s: float = math.inf
) -> list[Outcome]:
    """Returns how every visit ended, ``num_at_once`` turns going on at a time; none begins after ``within_s``.

    Who is refused waits before its next turn as long as it was told; each time in a row twice as long as the time
    before, up to ``LONGEST_PAUSE_S``.
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
    """Counts, and under "lost" what should not have been: a line for each."""
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
    """Whether a process that carried the connection was struck while it was open, or died then of a stroke before."""
    return any(
        kind in CARRIERS and outcome.began_s - CARRIER_DIES_WITHIN_S <= at_s <= outcome.ended_s for at_s, kind in struck
    )
