"""Results of a benchmark: median and spread, and all of them as one document at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and spread of repeated measurements, in their unit."""

    median: float
    lowest: float
    highest: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values), num=len(values))

    def rounded(self, digits: int = 3) -> dict[str, float]:
        return {name: round(value, digits) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f}, {self.num}x)"


def percentile(values: Iterable[float], percent: int) -> float:
    """Return the value below which ``percent`` percent of ``values`` lie; there is one at least."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def status_of(results: Iterable[Mapping[str, Any]]) -> int:
    """Return the exit status: 0 if one of ``results`` has no "error", else 1."""
    return 0 if any("error" not in result for result in results) else 1


def tell(document: dict[str, Any], results: Iterable[Any], out: Path | None) -> None:
    """Print each of ``results``, then the document with all of them. ``out`` is written after each."""
    document["results"] = []
    for result in results:
        print(json.dumps(result), flush=True)
        document["results"].append(result)
        if out is not None:
            out.write_text(json.dumps(document))
    print(json.dumps(document), flush=True)


def in_gib(num_bytes: float) -> float:
    """Return GiB with two places."""
    return round(num_bytes / 2**30, 2)
