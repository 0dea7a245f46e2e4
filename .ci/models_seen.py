"""Which published models were seen on a GPU, by the results of ``python -m benchmarks.sweep``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from benchmarks.sweep.kept import ERROR, Kept, Result

RESULTS = Path(__file__).parents[1] / "benchmarks" / "reports" / "sweep.jsonl"
NOT_YET = "not yet"
MOST_SAID = 160
"""Characters of a reason."""


NO_SWEEP = """**No sweep has run yet**: that a model starts, is captured and decodes on a GPU is told by the reports in
*timed* alone.

"""


def state() -> str:
    """What is said before the table: nothing once there are results."""
    return "" if swept() else NO_SWEEP


def seen(model: str) -> str:
    """Returns date, milliseconds a step and GPUs of each number of ranks, or why there are none; or "not yet"."""
    newest = {one["ranks"]: one for one in swept() if one["model"] == model}
    return "; ".join(said(newest[ranks]) for ranks in sorted(newest)) or NOT_YET


@cache
def swept() -> tuple[Result, ...]:
    return tuple(of_gpus(Kept(RESULTS).results()))


def of_gpus(results: Iterable[Result]) -> Iterable[Result]:
    return (one for one in results if one["hardware"] != "CPU")


def said(result: Result) -> str:
    where = f"{result['ranks']} × {result['hardware'].removeprefix('NVIDIA ')}"
    if ERROR in result:
        reason = " ".join(str(result[ERROR]).split()).replace("|", "/")
        return f"{result['date']}, {where}: failed ({reason[:MOST_SAID]})"
    faults = [] if result["captured"] else ["not captured"]
    faults += [] if result["same_bytes"] else ["not the same bytes twice"]
    part = "" if result["through"] == "application" else f"{result['through']} alone"
    notes = ", ".join(filter(None, (part, *faults)))
    return f"{result['date']}, {where}: {result['step_ms']} ms" + (f" ({notes})" if notes else "")
