"""Requests to models that take turns: one after another, all at once, and while a sleeping rank is killed."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.faults.timeline import rank_pids, records_of

Make = Callable[[str], tuple[bytes, float]]
"""Returns the file of a model's request, and the seconds that it took."""
ASLEEP_WITHIN_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Requests of a model that is awake, without others."""

    data: bytes
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers of a model in mixed traffic."""

    arrivals_s: list[float]
    """Since the traffic began."""
    times_s: list[float]
    same_bytes: bool


def alone(make: Make, models: Sequence[str]) -> dict[str, Alone]:
    """Return the third of three requests of each model: weights are awake and shapes warm."""
    found = {}
    for model in models:
        data, took_s = [make(model) for _ in range(3)][-1]
        found[model] = Alone(data=data, took_s=took_s)
    return found


def swaps(make: Make, expected: Mapping[str, Alone], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a request after one for the same model, and after one for each of the others."""
    for name in expected:
        same, awake_s, asleep_s = True, [], []
        for _ in range(rounds):
            for other in [one for one in expected if one != name]:
                make(other)
                data, took_s = make(name)
                asleep_s.append(took_s)
                same = same and data == expected[name].data
            data, took_s = make(name)
            awake_s.append(took_s)
        yield {
            "case": "swap",
            "model": name,
            "awake_s": median(awake_s),
            "asleep_s": median(asleep_s),
            "later_s": median(asleep_s) - median(awake_s),
            "latest_s": max(asleep_s) - median(awake_s),
            "same_bytes": same,
        }


def mixed(make: Make, expected: Mapping[str, Alone], seconds: float) -> dict[str, Any]:
    """Send requests to all models, one after the other for each, with pauses up to twice a request's time.

    ``wait_s`` is the mean time beyond that of a request alone. ``wait_in_parts_s`` is the same for the same arrivals,
    calculated, if each model had a gang for its part of the time and none otherwise (``in_parts``).
    """
    begin_s = time.monotonic()

    def follow(name: str) -> Answers:
        pauses, arrivals_s, times_s, same = random.Random(name), [], [], True
        while (arrival_s := time.monotonic() - begin_s) < seconds:
            data, took_s = make(name)
            arrivals_s.append(arrival_s)
            times_s.append(took_s)
            same = same and data == expected[name].data
            time.sleep(pauses.uniform(0, 2 * took_s))
        return Answers(arrivals_s=arrivals_s, times_s=times_s, same_bytes=same)

    with ThreadPoolExecutor(len(expected)) as pool:
        answers = dict(zip(expected, pool.map(follow, expected), strict=True))
    return {"case": "mixed", "seconds": seconds, **summary_of(answers, expected, seconds)}


def summary_of(answers: Mapping[str, Answers], expected: Mapping[str, Alone], seconds: float) -> dict[str, Any]:
    """Return means and counts by model. All models have answers."""
    parts_s = {
        name: in_parts(one.arrivals_s, expected[name].took_s, number, len(answers), seconds)
        for number, (name, one) in enumerate(answers.items())
    }
    return {
        "mean_s": {name: fmean(one.times_s) for name, one in answers.items()},
        "longest_s": {name: max(one.times_s) for name, one in answers.items()},
        "wait_s": {name: fmean(one.times_s) - expected[name].took_s for name, one in answers.items()},
        "wait_in_parts_s": {name: fmean(times_s) - expected[name].took_s for name, times_s in parts_s.items()},
        "num_requests": {name: len(one.times_s) for name, one in answers.items()},
        "same_bytes": all(one.same_bytes for one in answers.values()),
    }


def in_parts(arrivals_s: Sequence[float], work_s: float, number: int, num: int, period_s: float) -> list[float]:
    """Return the latencies of requests of ``work_s`` each to a gang that runs in part ``number`` of ``num`` equal ones.

    Parts repeat with ``period_s``. Requests run in order of arrival, and continue in the next part of their gang.
    Starts of gangs cost nothing here.
    """
    part_s, free_s, latencies_s = period_s / num, 0.0, []
    for arrival_s in arrivals_s:
        now_s, left_s = max(arrival_s, free_s), work_s
        period = math.floor(now_s / period_s)
        while left_s > 0:
            begin_s = period * period_s + number * part_s
            now_s = max(now_s, begin_s)
            ran_s = min(left_s, max(0.0, begin_s + part_s - now_s))
            now_s, left_s, period = now_s + ran_s, left_s - ran_s, period + 1
        free_s = now_s
        latencies_s.append(now_s - arrival_s)
    return latencies_s


def kills(make: Make, expected: Mapping[str, Alone], logs: Path) -> Iterator[dict[str, Any]]:
    """Kill -9 a rank of each model while the model sleeps, ask all models at once, and yield what became of it."""
    for name in expected:
        make(next(other for other in expected if other != name))
        was_asleep, before = _sleeps(logs, name), rank_pids(logs, name)
        os.kill(before[-1], signal.SIGKILL)
        with ThreadPoolExecutor(len(expected)) as pool:
            answers = dict(zip(expected, pool.map(make, expected), strict=True))
        yield {
            "case": "kill -9 of a rank",
            "model": name,
            "was_asleep": was_asleep,
            "later_s": {other: took_s - expected[other].took_s for other, (_, took_s) in answers.items()},
            "new_gang": not {*rank_pids(logs, name)} & {*before},
            "same_bytes": all(data == expected[other].data for other, (data, _) in answers.items()),
        }


def _sleeps(logs: Path, model: str) -> bool:
    """Wait until the model's gang sleeps. Return False if it does not in time, since all models fit together."""
    end_s = time.monotonic() + ASLEEP_WITHIN_S
    while time.monotonic() < end_s:
        moves = [one["phase"] for one in records_of(logs) if one.get("model") == model and _is_move(one)]
        if moves and moves[-1] == "gang: sleep":
            return True
        time.sleep(POLL_S)
    return False


def _is_move(record: Mapping[str, Any]) -> bool:
    return record.get("phase") in ("gang: sleep", "gang: wake")
