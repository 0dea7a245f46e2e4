"""Arrivals of requests: at random, in bursts, or from a file, with their owners."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.load.mix import Mix, RequestClass, known_file
from benchmarks.load.owner import Owner, Owners

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request of ``kind``, ``at_s`` after the start; ``owner`` is None where the server asks for no keys."""

    at_s: float
    kind: RequestClass
    seed: int
    owner: Owner | None = None


def poisson(mix: Mix, rate_per_s: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Return independent arrivals, ``rate_per_s`` on average."""
    random = Random(seed)

    def times() -> Iterator[float]:
        at_s = random.expovariate(rate_per_s)
        while at_s < duration_s:
            yield at_s
            at_s += random.expovariate(rate_per_s)

    return _drawn(mix, tuple(times()), random)


def bursts(mix: Mix, size: int, every_s: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Return ``size`` arrivals at once, every ``every_s`` from the start on."""
    num_bursts = max(1, round(duration_s / every_s))
    return _drawn(mix, tuple(number * every_s for number in range(num_bursts) for _ in range(size)), Random(seed))


def trace_file(name: str) -> Path:
    """Return a file, or that of a known trace by its name. ValueError lists the known ones."""
    return known_file(name, TRACES, ".jsonl")


def trace(mix: Mix, path: Path, seed: int) -> tuple[Arrival, ...]:
    """Read lines such as ``{"at_s": 1.5, "class": "small"}``. A missing class is drawn. ValueError for other lines."""
    random, arrivals = Random(seed), []
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        unknown = set(entry) - {"at_s", "class"}
        if unknown or not isinstance(entry.get("at_s"), int | float):
            raise ValueError(f"{path}, line {number + 1}: {line}; it must be {{'at_s': seconds, 'class': name}}")
        kind = mix.named(entry["class"]) if "class" in entry else mix.drawn(random)
        arrivals.append(Arrival(at_s=float(entry["at_s"]), kind=kind, seed=number))
    return tuple(sorted(arrivals, key=lambda one: one.at_s))


def owned(arrivals: Sequence[Arrival], owners: Owners, seed: int) -> tuple[Arrival, ...]:
    """Return the same arrivals, each with one of ``owners``."""
    drawn = owners.drawn(len(arrivals), seed)
    return tuple(replace(one, owner=owner) for one, owner in zip(arrivals, drawn, strict=True))


def _drawn(mix: Mix, times: tuple[float, ...], random: Random) -> tuple[Arrival, ...]:
    return tuple(Arrival(at_s=at_s, kind=mix.drawn(random), seed=seed) for seed, at_s in enumerate(times))
