"""Predict when queued clips end, from the queue and from measured times of similar clips."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deployments.service.interface import StageTimes
from engines.gang.eta.measured_times import MeasuredTimes, TimeKey
from pipelines.request import MediaRequest, StepKind

USUAL_PICTURES = 2
"""Pictures of a clip that are its first and last frame; more are references, each of which makes steps longer."""


class OpenClip(NamedTuple):
    """A queued or running clip. Times are Unix seconds."""

    id: str
    model: str
    alike: str
    status: str
    eta_at_s: float | None
    """Predicted end; None before its gang's prediction."""
    not_before_s: float


def duration_key(request: MediaRequest) -> str:
    """Return the key of clips of one model that take equally long.

    The database keeps keys, in a short column: adapters are not in them, nor a first and a last picture.
    """
    kind, steps = StepKind.of(request), request.num_inference_steps
    references = f" pictures={request.num_pictures}" if request.num_pictures > USUAL_PICTURES else ""
    return f"{kind.size} steps={steps} branches={kind.num_branches} cache={request.cache}{kind.settings}{references}"


def clip_times() -> MeasuredTimes:
    """Return a store of clip durations; the shortest of each key counts, measured without contention."""
    return MeasuredTimes(None, "clips", shortest=True)


def clip_key(model: str, duration: str) -> TimeKey:
    return f"{model} {duration}", 0


def learn_clip(times: MeasuredTimes, request: MediaRequest, timings: StageTimes) -> None:
    """Record the duration of a finished clip, without its wait for the gang."""
    times.learn(clip_key(request.model, duration_key(request)), timings.total_s - timings.queue_s)


def nums_before(clips: Iterable[OpenClip]) -> dict[str, int]:
    """Return the queue position of each queued clip within its model, by id; ``clips`` are in queue order."""
    counts: defaultdict[str, int] = defaultdict(int)
    before: dict[str, int] = {}
    for clip in clips:
        if clip.status == "queued":
            before[clip.id] = counts[clip.model]
            counts[clip.model] += 1
    return before


def predicted_ends_s(
    clips: Iterable[OpenClip], times: MeasuredTimes, num_gangs: Mapping[str, int], now_s: float
) -> dict[str, float | None]:
    """Return the predicted end (Unix seconds) of each of ``clips``, in queue order, by id.

    A model has ``num_gangs``, by default one. Its gangs finish their running clips, then take the queued ones in turn.
    After a clip of unknown duration, all are None.
    """
    by_model: defaultdict[str, list[OpenClip]] = defaultdict(list)
    for clip in clips:
        by_model[clip.model].append(clip)
    ends_s: dict[str, float | None] = {}
    for model, queue in by_model.items():
        ends_s |= _ends_of_model_s(queue, times, num_gangs.get(model, 1), now_s)
    return ends_s


def _ends_of_model_s(
    queue: Sequence[OpenClip], times: MeasuredTimes, num_gangs: int, now_s: float
) -> dict[str, float | None]:
    ends_s: dict[str, float | None] = {clip.id: None for clip in queue}
    free_s = now_s
    for clip in sorted(queue, key=lambda clip: clip.status):  # first in_progress, then queued
        duration_s = times.get(clip_key(clip.model, clip.alike))
        if clip.status == "in_progress" and clip.eta_at_s is not None:
            ends_s[clip.id] = clip.eta_at_s
            free_s = max(free_s, clip.eta_at_s)
        elif duration_s is None:
            break
        else:
            ends_s[clip.id] = max(free_s, clip.not_before_s) + duration_s
            free_s += duration_s / num_gangs
    return ends_s
