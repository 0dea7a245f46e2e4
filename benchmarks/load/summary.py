"""Summary of a load in all, by class and by owner, as numbers and as a plot."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.client import Outcome
from benchmarks.load.mix import Kind
from benchmarks.results import percentile

STEPS = "troupe_step_seconds"


def summary(outcomes: Sequence[Outcome], lone_s: Mapping[str, float], scale: float) -> dict[str, Any]:
    """Return latencies in seconds from the time of arrival, and shares of requests that meet a deadline.

    A deadline is ``scale`` times the lone time; a request that is not answered right misses it. ``eta`` is the error of
    the server's predictions, ``gpu_s`` the time that it reports for ranks' work on a picture and on a clip.
    """
    end_s = max(one.at_s + one.latency_s for one in outcomes)
    right = [one for one in outcomes if one.is_right]
    classes = {
        name: _class([one for one in outcomes if one.name == name], lone_s[name], scale)
        for name in lone_s
        if any(one.name == name for one in outcomes)
    }
    met = sum(round(found["attainment"] * found["requests"]) for found in classes.values())
    return {
        "requests": len(outcomes),
        "right": len(right),
        "statuses": dict(Counter(str(one.status) for one in outcomes)),
        "throughput_per_s": round(len(right) / end_s, 4),
        "latency_s": points([one.latency_s for one in right]),
        "eta": eta(outcomes),
        "gpu_s": {
            kind: round(statistics.fmean(of_kind), 4)
            for kind in get_args(Kind)
            if (of_kind := [one.each_gpu_s for one in right for _ in range(one.num_media) if one.kind == kind])
        },
        "attainment": round(met / len(outcomes), 4),
        "deadline_scale": scale,
        "latest_send_s": round(max(one.late_s for one in outcomes), 4),
        "classes": classes,
        "owners": {
            name: _owner([one for one in outcomes if one.owner == name])
            for name in sorted({one.owner for one in outcomes if one.owner})
        },
    }


def _owner(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    right = [one for one in outcomes if one.is_right]
    gpu_s = sum(one.gpu_s for one in right)
    latency_s = points([one.latency_s for one in right])
    return {"requests": len(outcomes), "right": len(right), "latency_s": latency_s, "gpu_s": round(gpu_s, 4)}


def _class(outcomes: Sequence[Outcome], lone_s: float, scale: float) -> dict[str, Any]:
    right = [one for one in outcomes if one.is_right]
    num_met = sum(one.latency_s <= scale * lone_s for one in right)
    return {
        "kind": outcomes[0].kind,
        "eta": eta(outcomes),
        "requests": len(outcomes),
        "right": len(right),
        "lone_s": round(lone_s, 4),
        "latency_s": points([one.latency_s for one in right]),
        "gpu_s": points([one.each_gpu_s for one in right]),
        "attainment": round(num_met / len(outcomes), 4),
    }


def eta(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the number of answers with a prediction, and its error as a share of the actual time."""
    errors = [error for one in outcomes if one.is_right and (error := one.eta_error) is not None]
    if not errors:
        return {"told": 0}
    p95 = percentile(errors, 95)
    return {"told": len(errors), "median_error": round(statistics.median(errors), 4), "p95_error": round(p95, 4)}


def points(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles; nothing without values."""
    if not values:
        return {}
    parts = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    return {name: round(value, 4) for name, value in {"mean": statistics.fmean(values), **parts}.items()}


def gpu_use(before: str, after: str, took_s: float, num_gpus: int, num_pictures: int) -> dict[str, float]:
    """Return ranks' seconds in steps between two looks at ``/metrics``: per right answer, and as a share of the time.

    A rank on the CPU counts as a GPU. The metrics count steps of all ranks of a team.
    """
    step_s = _rank_seconds(after) - _rank_seconds(before)
    each = step_s / num_pictures if num_pictures else 0.0
    return {"rank_s_per_request": round(each, 4), "share_in_steps": round(step_s / (took_s * num_gpus), 4)}


def _rank_seconds(text: str) -> float:
    families = text_string_to_metric_families(text)
    samples = (sample for family in families if family.name == STEPS for sample in family.samples)
    return sum(one.value * int(one.labels["num_ranks"]) for one in samples if one.name == f"{STEPS}_sum")


def print_classes(document: Mapping[str, Any]) -> None:
    for name, found in document["classes"].items():
        latency = ", ".join(f"{point} {value:.2f}" for point, value in found["latency_s"].items()) or "none answered"
        share = f"{100 * found['attainment']:.0f} % within {document['deadline_scale']:g} x {found['lone_s']:.2f} s"
        wrong = f"ETA wrong by {100 * found['eta']['median_error']:.0f} %" if found["eta"]["told"] else "no ETA"
        work = f"{found['gpu_s']['mean']:.2f} GPU-s a {found['kind']}" if found["gpu_s"] else "no GPU-s"
        parts = (f"{name:12} {found['right']:4} of {found['requests']:4}", latency, share, wrong, work)
        print("  ".join(parts), file=sys.stderr, flush=True)


def plot(outcomes: Sequence[Outcome], lone_s: Mapping[str, float], scale: float, path: Path) -> None:
    """Plot latency against arrival, and the share of each class that was answered within a time."""
    import matplotlib.pyplot as plt

    figure, (times, shares) = plt.subplots(1, 2, figsize=(11, 4))
    for name, alone_s in lone_s.items():
        right = [one for one in outcomes if one.name == name and one.is_right]
        if not right:
            continue
        times.plot([one.at_s for one in right], [one.latency_s for one in right], ".", label=name)
        ordered = sorted(one.latency_s / alone_s for one in right)
        shares.step(ordered, [(number + 1) / len(ordered) for number in range(len(ordered))], where="post", label=name)
    shares.axvline(scale, color="black", linewidth=0.8, linestyle="--")
    times.set(xlabel="arrival, s", ylabel="latency, s", yscale="log")
    shares.set(xlabel="latency, in times the lone one", ylabel="share answered", xscale="log")
    shares.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
