"""When clips that wait on the disk will be done: by those before them, and by how long clips like them took."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deployments.studio.interface import StageTimes
from pipelines.request import MediaRequest

MAX_KNOWN = 256
"""Kinds of clips; the one that was met last the longest ago is forgotten first."""


class OpenClip(NamedTuple):
    """A clip that waits or is made; ``eta_at_s`` (Unix seconds) is what its gang predicts, None if that is not asked
    yet, or does not know."""

    id: str
    model: str
    alike: str
    status: str
    eta_at_s: float | None
    not_before_s: float


def alike(request: MediaRequest) -> str:
    """Returns what clips of one model must have in common to take equally long."""
    branches = 2 if request.true_cfg_scale > 1 else 1
    size = f"{request.width}x{request.height}x{request.num_frames}" + (" silent" if request.sound is False else "")
    return f"{size} steps={request.num_inference_steps} branches={branches} cache={request.cache}"


class ClipTimes:
    """How long clips took beside nobody, by their model and what they are like: the shortest that was seen."""

    def __init__(self) -> None:
        self._known_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def learn(self, request: MediaRequest, timings: StageTimes) -> None:
        kind, took_s = (request.model, alike(request)), timings.total_s - timings.queue_s
        self._known_s[kind] = min(took_s, self._known_s.pop(kind, took_s))
        while len(self._known_s) > MAX_KNOWN:
            self._known_s.popitem(last=False)

    def takes_s(self, clip: OpenClip) -> float | None:
        """Returns what ``clip`` takes by itself; None before one like it was finished."""
        return self._known_s.get((clip.model, clip.alike))


def predicted_ends_s(
    clips: Iterable[OpenClip], times: ClipTimes, num_gangs: Mapping[str, int], now_s: float
) -> dict[str, float | None]:
    """Returns when each of ``clips``, which are in their order, will be done (Unix seconds), by its id.

    Gangs of a model (one unless ``num_gangs`` says so) make those first that they have, and then the others in turn.
    Behind a clip of which nothing is known, nothing is.
    """
    by_model: defaultdict[str, list[OpenClip]] = defaultdict(list)
    for clip in clips:
        by_model[clip.model].append(clip)
    ends_s: dict[str, float | None] = {}
    for model, queue in by_model.items():
        ends_s |= _ends_of_model_s(queue, times, num_gangs.get(model, 1), now_s)
    return ends_s


def _ends_of_model_s(
    queue: Sequence[OpenClip], times: ClipTimes, num_gangs: int, now_s: float
) -> dict[str, float | None]:
    ends_s: dict[str, float | None] = {clip.id: None for clip in queue}
    free_s = now_s
    for clip in sorted(queue, key=lambda clip: clip.status):  # those in progress, then the queued ones
        takes_s = times.takes_s(clip)
        if clip.status == "in_progress" and clip.eta_at_s is not None:
            ends_s[clip.id] = clip.eta_at_s
            free_s = max(free_s, clip.eta_at_s)
        elif takes_s is None:
            break
        else:
            ends_s[clip.id] = max(free_s, clip.not_before_s) + takes_s
            free_s += takes_s / num_gangs
    return ends_s
