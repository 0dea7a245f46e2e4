"""What is measured of an application that runs, part by part, each of which can be asked for by its name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from statistics import fmean
from typing import Any

import httpx

from benchmarks.application.client import PROMPT, Client, Timing, data_of, medians, timing
from benchmarks.application.clip_shape import ANY_CLIP, ClipShape
from benchmarks.application.memory import peak_memory
from benchmarks.faults.timeline import rank_pids
from benchmarks.load.client import Answer
from benchmarks.serving.application import Application
from benchmarks.spread import Spread

NUM_REPEATS, NUM_NEW, NUM_LARGE = 5, 8, 3
NUM_CLIPS = 3
"""Beside the first one."""
NUM_CLIENTS, NUM_OVERLAPPING = 2, 12

Document = dict[str, Any]


@dataclass(kw_only=True)
class Visit:
    """An application and its client. What several parts need is measured once, by the first of them. ``at_once``
    pictures come together; ``clips`` are those that are asked for."""

    application: Application
    client: Client
    at_once: int = 8
    clips: Sequence[ClipShape] = (ANY_CLIP,)

    def __post_init__(self) -> None:
        self._numbers = count()

    @cached_property
    def card(self) -> Mapping[str, Any]:
        """What the application says of its model: ``id``, ``kind`` (image or video), ``defaults`` of requests."""
        return self.client.get("/v1/models").raise_for_status().json()["data"][0]  # type: ignore[no-any-return]

    @cached_property
    def first(self) -> tuple[Timing, bytes]:
        """The first picture (of a model that makes clips, the first of these), and how long it took."""
        answer = self.made()
        return timing(answer), data_of(answer)

    @property
    def makes_clips(self) -> bool:
        return bool(self.card["kind"] == "video")

    def made(self) -> httpx.Response:
        """What the first one was, again."""
        return self.client.filmed(**self.clips[0].fields) if self.makes_clips else self.client.painted()

    @cached_property
    def new_prompts(self) -> Sequence[Timing]:
        """Pictures one after the other, each with a prompt that the encoder has not seen."""
        _ = self.first
        return [timing(self.client.painted(prompt=self.new_prompt())) for _ in range(NUM_NEW)]

    def new_prompt(self) -> str:
        return f"{PROMPT}, number {next(self._numbers)}"


def pictures(visit: Visit) -> Document:
    """The first one, the same again, whose prompt's encoding was kept, and others."""
    first, expected = visit.first
    same = [visit.client.painted() for _ in range(NUM_REPEATS)]
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
    """Until the client had all of each, which says less of itself: its total ends before its bytes are written."""
    return Spread.of([1e3 * one.elapsed.total_seconds() for one in answers]).rounded(1)


def eta_error(answers: Sequence[httpx.Response]) -> dict[str, float] | None:
    """Of those that were told when they would be there, as a share of what they took; None where none was."""
    errors = [error for one in answers if (error := Answer.of(one).eta_error) is not None]
    return Spread.of(errors).rounded(3) if errors else None


def jpeg(visit: Visit) -> Document:
    return {"jpeg": medians([timing(visit.client.painted(output_format="jpeg")) for _ in range(NUM_REPEATS)])}


def half_side(visit: Visit) -> Document:
    """The first one of the size is not counted."""
    small = [timing(visit.client.painted_square(visit.client.side // 2)) for _ in range(NUM_REPEATS + 1)]
    return {"half_side": medians(small[1:])}


def double_side(visit: Visit) -> Document:
    """With what the first GPU holds meanwhile; the first one of the size is not counted, but in that."""
    with peak_memory() as peak:
        large = [timing(visit.client.painted_square(2 * visit.client.side)) for _ in range(NUM_LARGE)]
    return {"double_side": medians(large[1:]), "gpu_gib": peak.rounded()}


def edit(visit: Visit) -> Document:
    """Nothing of a model that takes no pictures."""
    if not visit.card["defaults"].get("max_pictures"):
        return {"edit": None}
    return {"edit": medians([timing(visit.client.edited()) for _ in range(NUM_REPEATS)][1:])}


def at_once(visit: Visit) -> Document:
    """Pictures that come together."""
    num = visit.at_once
    took_s, answers = _side_by_side(num, [{"seed": seed} for seed in range(num)], visit.client)
    totals_ms = [timing(one)["total"] for one in answers]
    told = {"total_ms": Spread.of(totals_ms).rounded(0), "mean_ms": round(fmean(totals_ms))}
    return {"at_once": {"num": num, "per_s": round(num / took_s, 3), **told, "eta_error": eta_error(answers)}}


def clips(visit: Visit) -> Document:
    """Of each shape the first one, and the same again; with what the first GPU holds meanwhile."""
    return {"clips": {str(shape): _clip(visit, shape) for shape in visit.clips}}


def _clip(visit: Visit, shape: ClipShape) -> Document:
    with peak_memory() as peak:
        first, *again = [visit.client.filmed(**shape.fields) for _ in range(1 + NUM_CLIPS)]
    return {
        "first": timing(first),
        "clip": medians([timing(one) for one in again]),
        "answered_ms": answered_ms(again),
        "same_bytes": all(data_of(one) == data_of(first) for one in again),
        "bytes": len(data_of(first)),
        "gpu_gib": peak.rounded(),
    }


def overlap(visit: Visit) -> Document:
    """Two clients, whose pictures are encoded and decoded while the other's steps go on, beside pictures alone: how
    much they slow each other."""
    alone = medians(visit.new_prompts)
    asked = [{"prompt": visit.new_prompt(), "seed": number} for number in range(NUM_OVERLAPPING)]
    took_s, answers = _side_by_side(NUM_CLIENTS, asked, visit.client)
    both = medians([timing(one) for one in answers])
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
    """``kill -9`` of a rank, and what came first at once again."""
    _, expected = visit.first
    os.kill(rank_pids(visit.application.logs, visit.card["id"])[-1], signal.SIGKILL)
    start_s = time.perf_counter()
    answer = visit.made()
    took_s = time.perf_counter() - start_s
    return {"after_a_kill": {"answered_s": round(took_s, 1), "same_bytes": data_of(answer) == expected}}


def _side_by_side(
    num_clients: int, asked: Sequence[Mapping[str, Any]], client: Client
) -> tuple[float, list[httpx.Response]]:
    """Seconds until all are there, and each."""
    with ThreadPoolExecutor(num_clients) as pool:
        start_s = time.perf_counter()
        answers = list(pool.map(lambda fields: client.painted(**fields), asked))
        return time.perf_counter() - start_s, answers


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
    "kill": kill,
}
"""In the order in which they are measured: what makes others slower comes last."""
OF_CLIPS, OF_ALL_MODELS = {"clips"}, {"kill"}
"""All others are of models that make pictures."""


def find_parts(told: str) -> dict[str, Part]:
    """Returns the parts whose names are in ``told``, with commas between, in their own order. ValueError lists the
    known names."""
    names = told.split(",")
    for name in names:
        if name not in PARTS:
            raise ValueError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
    return {name: part for name, part in PARTS.items() if name in names}


def is_for(name: str, visit: Visit) -> bool:
    """Whether the model makes what the part ``name`` measures."""
    return name in OF_ALL_MODELS or (name in OF_CLIPS) == visit.makes_clips
