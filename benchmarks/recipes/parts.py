"""Parts of the measurement. Each yields lines of results, the most important ones first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.application.memory import peak_memory
from benchmarks.faults.timeline import rank_pids
from benchmarks.recipes.requests import PLAIN, Made, Served, are_equal, medians, psnr_db
from benchmarks.recipes.served import FP8, sources_of
from pipelines.loading import resolve_file
from pipelines.lora.source import ADAPTER_FILES

LATE = "late"
"""The adapter that is added at run time."""
NUM_QUEUED = 2
"""Requests of each way in the part queue."""

Document = dict[str, Any]


def recipes(served: Served) -> Iterator[Document]:
    """Measure each way alone: the first time, and again."""
    for way in (PLAIN, *served.with_adapters):
        yield _alone(served, way)


def _alone(served: Served, way: str) -> Document:
    with peak_memory() as peak:
        first, *again = [served.make(way) for _ in range(1 + served.repeats)]
    steps = served.steps_of(way)
    return {
        "way": way,
        "steps": steps,
        "first": first.stages,
        "again": medians(again),
        "step_ms": round(_denoise_ms(again) / steps, 2),
        "same_bytes": served.are_same(again),
        "psnr_db": psnr_db(first.data, _plain(served).data),
        "gpu_gib": peak.rounded(),
    }


def _plain(served: Served) -> Made:
    """Return the first answer of the model's own settings."""
    return served.firsts.get(PLAIN) or served.make()


def _denoise_ms(made: Sequence[Made]) -> float:
    return median(one.denoise_ms for one in made)


def switch(served: Served) -> Iterator[Document]:
    """Measure what a change of adapters costs: plain and a recipe in turns, then one recipe and another.

    The cost is the time of denoising in turns minus that of the same way again, one request after the other.
    """
    ways = served.with_adapters
    for one, other in pairwise((PLAIN, *ways[:2])):
        repeated = {way: _denoise_ms([served.make(way) for _ in range(1 + served.repeats)][1:]) for way in (one, other)}
        turns = [served.make(way) for _ in range(1 + served.repeats) for way in (one, other)][1:]
        costs = {way: _denoise_ms([x for x in turns if x.way == way]) - repeated[way] for way in repeated}
        steps = {way: repeated[way] / served.steps_of(way) for way in repeated}
        yield {
            "between": [one, other],
            "again_ms": _rounded(repeated),
            "switch_ms": _rounded(costs),
            "step_ms": _rounded(steps),
            "is_within_a_step": max(costs.values()) <= min(steps.values()),
            "same_bytes": served.are_same(turns),
        }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def attention(served: Served) -> Iterator[Document]:
    """Measure the recipe whose attention is in float8."""
    if FP8 not in served.recipes:
        raise RuntimeError("this GPU computes no attention in float8: fa3-fwd is missing, or it is no Hopper GPU")
    before = _denoise_ms([served.make() for _ in range(1 + served.repeats)][1:])
    found = _alone(served, FP8)
    yield {**found, "plain_step_ms": round(before / served.steps_of(PLAIN), 2)}


def loras(served: Served) -> Iterator[Document]:
    """Add a recipe's adapter under another name while requests run. Then ask for it with the recipe's settings.

    The pixels must be the recipe's. Files differ, since they name the request.
    """
    way, *_ = served.with_adapters
    expected = served.firsts.get(way) or served.make(way)
    alone_ms = _denoise_ms([served.make() for _ in range(1 + served.repeats)][1:])
    with peak_memory() as peak:
        with ThreadPoolExecutor(1) as pool:
            enough, is_under_way = threading.Event(), threading.Event()
            others = pool.submit(_until, enough, is_under_way, served)
            try:
                is_under_way.wait()
                begin_s = time.perf_counter()
                num_bytes = _add(served, way)
                answered_s = time.perf_counter() - begin_s
            finally:
                enough.set()
            during = others.result()
        first, *again = [served.make(LATE, **late_fields(served, way)) for _ in range(1 + served.repeats)]
    yield {
        "adapter_of": way,
        "bytes": num_bytes,
        "answered_s": round(answered_s, 3),
        "plain_denoise_ms": {"alone": round(alone_ms, 1), "during": [round(one.denoise_ms, 1) for one in during]},
        "first": first.stages,
        "again": medians(again),
        "same_bytes": served.are_same([*during, *again]),
        "pixels_as_recipe": are_equal(first.data, expected.data),
        "gpu_gib": peak.rounded(),
    }


def late_fields(served: Served, way: str) -> Document:
    """Return the fields of a request for the added adapter: the settings of the recipe ``way``, without its adapter."""
    settings = {name: value for name, value in served.recipes[way].items() if name not in ("lora", "likeness")}
    (scale,) = {one["scale"] for one in served.recipes[way]["lora"] if one["name"] == way}
    names = [_late_name(number) for number in range(len(sources_of(served.config, served.card["id"], way)))]
    return {**settings, "lora": [{"name": name, "scale": scale} for name in names]}


def _late_name(number: int) -> str:
    return LATE if number == 0 else f"{LATE}-{number + 1}"


def _until(enough: threading.Event, is_under_way: threading.Event, served: Served) -> list[Made]:
    """Make plain pictures or clips one after the other until it is enough."""
    made: list[Made] = []
    is_under_way.set()
    while not made or not enough.is_set():
        made.append(served.make())
    return made


def _add(served: Served, way: str) -> int:
    """Add the adapters of a recipe by ``POST /v1/loras``, one for each transformer. Return their bytes."""
    num_bytes = 0
    for number, source in enumerate(sources_of(served.config, served.card["id"], way)):
        path = Path(resolve_file(source.path, source.file, ADAPTER_FILES))
        form = {"model": served.card["id"], "name": _late_name(number), "part": source.part}
        with path.open("rb") as file:
            answer = served.client.post("/v1/loras", data=form, files={"file": (path.name, file)})
        if answer.status_code != httpx.codes.CREATED:
            raise RuntimeError(f"no adapter was added, but {answer.status_code}: {answer.text[:1000]}")
        num_bytes += answer.json()["bytes"]
    return num_bytes


def queue(served: Served) -> Iterator[Document]:
    """Measure jobs that lie in the queue behind each other: plain and a recipe in turns, and each kind by itself."""
    way, *_ = served.with_adapters
    mixed_s, mixed = served.make_each([PLAIN, way] * NUM_QUEUED)
    apart = {one: served.make_each([one] * NUM_QUEUED) for one in (PLAIN, way)}
    ended = [one.way for one in mixed]
    yield {
        "ways": [PLAIN, way],
        "num_of_each": NUM_QUEUED,
        "mixed_s": round(mixed_s, 3),
        "apart_s": {one: round(took_s, 3) for one, (took_s, _) in apart.items()},
        "extra_ms": round(1e3 * (mixed_s - sum(took_s for took_s, _ in apart.values())), 1),
        "ended": ended,
        "num_changes": sum(one != other for one, other in pairwise(ended)),
        "same_bytes": served.are_same([*mixed, *(made for _, several in apart.values() for made in several)]),
    }


def kill(served: Served) -> Iterator[Document]:
    """Kill a rank, and ask at once for the adapter that was added at run time, or for the first recipe."""
    way, *_ = served.with_adapters
    asked, fields = (LATE, late_fields(served, way)) if LATE in served.firsts else (way, {})
    expected = served.firsts.get(asked) or served.make(asked, **fields)
    os.kill(rank_pids(served.application.logs, served.card["id"])[-1], signal.SIGKILL)
    begin_s = time.perf_counter()
    made = served.make(asked, **fields)
    yield {
        "way": asked,
        "answered_s": round(time.perf_counter() - begin_s, 1),
        "same_bytes": made.data == expected.data,
    }


Part = Callable[[Served], Iterator[Document]]

PARTS: Mapping[str, Part] = {
    "recipes": recipes,
    "switch": switch,
    "attention": attention,
    "loras": loras,
    "queue": queue,
    "kill": kill,
}
"""Parts in the order of measurement."""
USUAL = ("recipes", "switch", "attention", "loras", "queue")
