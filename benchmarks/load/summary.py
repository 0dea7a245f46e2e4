"""What a load came to: by class and in all, as numbers and as a picture."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.client import Outcome
from benchmarks.load.mix import Kind

STEPS = "troupe_step_seconds"


def summary(outcomes: Sequence[Outcome], lone_s: Mapping[str, float], scale: float) -> dict[str, Any]:
    """Latencies in seconds, from the time of arrival. A deadline is ``scale`` times what the class takes alone; what is
    not answered right does not meet it. ``eta`` is how good the server's own predictions were, ``gpu_s`` what it says
    that ranks worked for a picture and for a clip."""
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
    }


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
    """How many answers came with a prediction, and by how much of what they took it was wrong; nothing of none."""
    errors = sorted(error for one in outcomes if one.is_right and (error := one.eta_error) is not None)
    if not errors:
        return {"told": 0}
    p95 = errors[min(len(errors) - 1, len(errors) * 95 // 100)]
    return {"told": len(errors), "median_error": round(statistics.median(errors), 4), "p95_error": round(p95, 4)}


def points(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    parts = {f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 95, 99)}
    return {name: round(value, 4) for name, value in {"mean": statistics.fmean(ordered), **parts}.items()}


def gpu_use(before: str, after: str, took_s: float, num_gpus: int, num_pictures: int) -> dict[str, float]:
    """What ``/metrics`` says of the time between: ranks' seconds in steps, of all requests, for each that was answered
    right, and their share of the time.

    A rank on the CPU counts as a GPU. The metrics count steps of all ranks of a team.
    """
    step_s = _rank_seconds(after) - _rank_seconds(before)
    each = step_s / num_pictures if num_pictures else 0.0
    return {"rank_s_per_request": round(each, 4), "share_in_steps": round(step_s / (took_s * num_gpus), 4)}


def _rank_seconds(text: str) -> float:
    families = text_string_to_metric_families(text)
    samples = (sample for family in families if family.name == STEPS for sample in family.samples)
    return sum(one.value * int(one.labels["num_ranks"]) for one in samples if one.name == f"{STEPS}_sum")


def plot(outcomes: Sequence[Outcome], lone_s: Mapping[str, float], scale: float, path: Path) -> None:
    """Latency against arrival, and the share of each class that was answered within a time. It makes the folder of
    ``path``, and imports matplotlib."""
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
