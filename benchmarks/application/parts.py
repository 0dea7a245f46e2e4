"""Parts of the measurement of a running application. Each can be chosen by name."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from statistics import fmean
from typing import Any

import httpx

from benchmarks.application.client import PROMPT, Client, Timing, data_of, medians, timing
from benchmarks.application.memory import peak_memory, samples_of
from benchmarks.faults.timeline import rank_pids
from benchmarks.load.client import Answer
from benchmarks.results import Spread, in_gib
from benchmarks.serving.application import Application, await_gang_end

NUM_REPEATS, NUM_NEW, NUM_LARGE = 5, 8, 3
NUM_CLIPS = 3
"""Clips after the first one."""
NUM_CLIENTS, NUM_OVERLAPPING = 2, 12
IDLE_S, MEMORY_EVERY_S = 5.0, 0.5
NUM_ZEROS = 3

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipShape:
    """Pixels, frames and steps. 0 is the model's default."""

    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_steps: int = 0

    @classmethod
    def of(cls, text: str) -> ClipShape:
        """Read 832x480x81, or 832x480x81@8 for 8 steps. ValueError for anything else."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?", text)
        if found is None:
            raise ValueError(f"{text!r} is no clip; write WIDTHxHEIGHTxFRAMES or WIDTHxHEIGHTxFRAMES@STEPS")
        width, height, num_frames, num_steps = (int(number or 0) for number in found.groups())
        return cls(width=width, height=height, num_frames=num_frames, num_steps=num_steps)

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}x{self.num_frames}" if self.width else "default"
        return f"{size}@{self.num_steps}" if self.num_steps else size

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a request."""
        size = {"size": f"{self.width}x{self.height}", "num_frames": self.num_frames} if self.width else {}
        return size | ({"num_inference_steps": self.num_steps} if self.num_steps else {})


ANY_CLIP = ClipShape()


@dataclass(kw_only=True)
class Visit:
    """An application and its client. The first part that needs a shared value measures it."""

    application: Application
    client: Client
    at_once: int = 8
    """Pictures that come together."""
    clips: Sequence[ClipShape] = (ANY_CLIP,)
    _numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def card(self) -> Mapping[str, Any]:
        """The application's description of its model: ``id``, ``kind`` (image or video), ``defaults`` of requests."""
        return self.client.card()

    @cached_property
    def first(self) -> tuple[Timing, bytes]:
        """Times and bytes of the first picture, or of the first clip of a model that makes clips."""
        answer = self.make_first()
        return timing(answer), data_of(answer)

    @property
    def makes_clips(self) -> bool:
        return bool(self.card["kind"] == "video")

    def make_first(self) -> httpx.Response:
        """Make the first picture or clip, or make it again."""
        return self.client.film(**self.clips[0].fields) if self.makes_clips else self.client.paint()

    @cached_property
    def new_prompts(self) -> Sequence[Timing]:
        """Times of pictures one after the other, each with a prompt that the encoder has not seen."""
        _ = self.first
        return [timing(self.client.paint(prompt=self.new_prompt())) for _ in range(NUM_NEW)]

    def new_prompt(self) -> str:
        return f"{PROMPT}, number {next(self._numbers)}"


def pictures(visit: Visit) -> Document:
    """Measure the first picture, the same one again (its encoding is cached), and others."""
    first, expected = visit.first
    same = [visit.client.paint() for _ in range(NUM_REPEATS)]
    return {
        "first": first,
        "picture": medians([timing(one) for one in same]),
        "new_prompt": medians(visit.new_prompts),
        "answered_ms": answered_ms(same),
        "eta_error": eta_error(same),
        "same_bytes": all(data_of(one) == expected for one in same),
        "bytes": len(expected),
    }


def answered_ms(answers: Sequence[httpx.Response]) -> dict[str, float]:
    """Return the time until the client had all of an answer. The server's own total ends before it writes the bytes."""
    return Spread.of([1e3 * one.elapsed.total_seconds() for one in answers]).rounded(1)


def eta_error(answers: Sequence[httpx.Response]) -> dict[str, float] | None:
    """Return the error of predicted times, as a share of the actual ones. None if no answer has a prediction."""
    errors = [error for one in answers if (error := Answer.of(one).eta_error) is not None]
    return Spread.of(errors).rounded(3) if errors else None


def jpeg(visit: Visit) -> Document:
    return {"jpeg": medians([timing(visit.client.paint(output_format="jpeg")) for _ in range(NUM_REPEATS)])}


def half_side(visit: Visit) -> Document:
    """Measure pictures of half the side. The first one is not counted."""
    small = [timing(visit.client.paint_square(visit.client.side // 2)) for _ in range(NUM_REPEATS + 1)]
    return {"half_side": medians(small[1:])}


def double_side(visit: Visit) -> Document:
    """Measure pictures of twice the side, and the memory of the first GPU. The first one counts for memory only."""
    with peak_memory() as peak:
        large = [timing(visit.client.paint_square(2 * visit.client.side)) for _ in range(NUM_LARGE)]
    return {"double_side": medians(large[1:]), "gpu_gib": peak.rounded()}


def edit(visit: Visit) -> Document:
    """Measure edits. None for a model that takes no pictures."""
    if not visit.card["defaults"].get("max_pictures"):
        return {"edit": None}
    return {"edit": medians([timing(visit.client.edit()) for _ in range(NUM_REPEATS)][1:])}


def at_once(visit: Visit) -> Document:
    """Measure pictures that come together."""
    num = visit.at_once
    took_s, timed = visit.client.paint_each([{"seed": seed} for seed in range(num)], num)
    answers = [answer for _, answer in timed]
    totals_ms = [timing(one)["total"] for one in answers]
    times = {"total_ms": Spread.of(totals_ms).rounded(0), "mean_ms": round(fmean(totals_ms))}
    return {"at_once": {"num": num, "per_s": round(num / took_s, 3), **times, "eta_error": eta_error(answers)}}


def footprint(visit: Visit) -> Document:
    """Measure memory and CPU at rest, and the highest memory while pictures come together."""
    time.sleep(IDLE_S)
    idle_cores, idle = visit.application.cpu_share(IDLE_S), visit.application.memory()
    with samples_of(visit.application.memory, MEMORY_EVERY_S) as samples:
        at_once(visit)
    peak = max(sample.pss_bytes for sample in samples)
    memory = {"idle": in_gib(idle.pss_bytes), "peak": in_gib(peak)}
    cores = {"idle_cores": round(idle_cores, 3), "load_at_end": round(os.getloadavg()[0], 1)}
    return {"footprint": {"memory_gib": memory, "num_processes": idle.num_processes, **cores}}


def clips(visit: Visit) -> Document:
    """Measure the first clip of each shape and the same one again, and the memory of the first GPU."""
    return {"clips": {str(shape): _clip(visit, shape) for shape in visit.clips}}


def _clip(visit: Visit, shape: ClipShape) -> Document:
    with peak_memory() as peak:
        first, *again = [visit.client.film(**shape.fields) for _ in range(1 + NUM_CLIPS)]
    return {
        "first": timing(first),
        "clip": medians([timing(one) for one in again]),
        "answered_ms": answered_ms(again),
        "same_bytes": all(data_of(one) == data_of(first) for one in again),
        "bytes": len(data_of(first)),
        "gpu_gib": peak.rounded(),
    }


def overlap(visit: Visit) -> Document:
    """Measure how much two clients slow each other: one's picture is encoded and decoded during the other's steps."""
    alone = medians(visit.new_prompts)
    bodies = [{"prompt": visit.new_prompt(), "seed": number} for number in range(NUM_OVERLAPPING)]
    took_s, timed = visit.client.paint_each(bodies, NUM_CLIENTS)
    both = medians([timing(one) for _, one in timed])
    stages = ("encode", "denoise", "decode")
    return {
        "overlap": {
            "s_per_picture": round(took_s / NUM_OVERLAPPING, 4),
            "lone_s_per_picture": round(alone["total"]["median"] / 1e3, 4),
            **both,
            "beside_alone": {
                stage: round(both[stage]["median"] / alone[stage]["median"], 3)
                for stage in stages
                if alone[stage]["median"]
            },
        }
    }


def kill(visit: Visit) -> Document:
    """Kill a rank (``kill -9``) and ask at once for the first picture or clip again."""
    _, expected = visit.first
    os.kill(rank_pids(visit.application.logs, visit.card["id"])[-1], signal.SIGKILL)
    start_s = time.perf_counter()
    answer = visit.make_first()
    took_s = time.perf_counter() - start_s
    return {"after_a_kill": {"answered_s": round(took_s, 1), "same_bytes": data_of(answer) == expected}}


def zero(visit: Visit) -> Document:
    """Ask for the first picture or clip again when no gang runs any more, several times.

    For a model with ``denoiser.autoscaling``, whose ``min_replicas`` is 0. TimeoutError if its gang does not end.
    """
    _, expected = visit.first
    times_s, same = [], True
    for _ in range(NUM_ZEROS):
        await_gang_end(rank_pids(visit.application.logs, visit.card["id"]))
        start_s = time.perf_counter()
        answer = visit.make_first()
        times_s.append(round(time.perf_counter() - start_s, 2))
        same = same and data_of(answer) == expected
    return {"from_zero": {"answered_s": times_s, "same_bytes": same}}


Part = Callable[[Visit], Document]

PARTS: Mapping[str, Part] = {
    "pictures": pictures,
    "jpeg": jpeg,
    "half_side": half_side,
    "double_side": double_side,
    "edit": edit,
    "at_once": at_once,
    "overlap": overlap,
    "clips": clips,
    "footprint": footprint,
    "zero": zero,
    "kill": kill,
}
"""Parts in the order of measurement: what slows others down comes last."""
USUAL = tuple(name for name in PARTS if name not in ("footprint", "zero"))
OF_CLIPS, OF_ALL_MODELS = {"clips"}, {"zero", "kill"}
"""All other parts are for models that make pictures."""


def is_for(name: str, visit: Visit) -> bool:
    """Return whether the model makes what the part ``name`` measures."""
    return name in OF_ALL_MODELS or (name in OF_CLIPS) == visit.makes_clips
