"""What classes of requests take by themselves: measured over HTTP, or read from an earlier run."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, TypeAdapter

from benchmarks.load.client import NO_HEADERS, TIMEOUT_S, answered
from benchmarks.load.mix import RequestClass
from benchmarks.serving.settings import told_as
from deployments.cli.local import uses_proxies
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import StepKey, speedup

NUM_LONE = 3
STEPS = "troupe_step_seconds"

RankSeconds = Mapping[tuple[str, int], float]
"""Seconds of ranks in steps, all of a team added up, by the model and the size of the team."""


class Alone(BaseModel):
    """What a request of a class takes by itself: its model's steps on ``num_ranks`` (0: there were no metrics to tell),
    and all else that belongs to it.

    ``ratios`` are the times of a step on teams of other sizes beside that one, as far as they were measured.
    ``width``, ``height`` and ``num_frames`` are what it asks for; 0 is any number of frames.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    num_steps: int
    step_s: float
    other_s: float
    num_ranks: int
    width: int = 0
    height: int = 0
    num_frames: int = 1
    ratios: Mapping[int, float] = {}

    @property
    def lone_s(self) -> float:
        return self.num_steps * self.step_s + self.other_s

    def by_size(self, team_sizes: Iterable[int]) -> dict[int, float]:
        """Seconds of a step on teams of these sizes: as measured, else with the usual speed-up."""
        assert self.num_ranks, "measured without metrics"
        return {size: self.step_s * self._ratio(size) for size in team_sizes}

    def _ratio(self, size: int) -> float:
        return self.ratios.get(size, speedup(self.num_ranks) / speedup(size))


_ALL = TypeAdapter(dict[str, Alone])


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--alone``, whose value is what ``read`` returns."""
    told = "what classes take alone: what an earlier run of this or of the other printed, or kept"
    parser.add_argument("--alone", type=told_as(read), default={}, metavar="FILE", help=told)


def read(file: str | Path) -> dict[str, Alone]:
    """Returns what an earlier run printed, or kept: its document, the part "alone" of it, or output that ends with it.

    ValueError for anything else.
    """
    if not Path(file).is_file():
        raise ValueError(f"{file} is no file that a run of benchmarks.load or benchmarks.policies.live left")
    text = Path(file).read_text().strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = json.loads("".join(text.splitlines()[-1:]))
    return _ALL.validate_python(document.get("alone", document))


def told(alone: Mapping[str, Alone]) -> dict[str, Any]:
    """Returns what ``read`` reads."""
    return _ALL.dump_python(dict(alone), mode="json")  # type: ignore[no-any-return]


async def measured(
    url: str, metrics: Callable[[], str], kinds: Sequence[RequestClass], headers: Mapping[str, str] = NO_HEADERS
) -> dict[str, Alone]:
    """Medians of a few requests of each class, the first not counted. RuntimeError if one is not answered.

    ``metrics`` reads the server's page of them, and is empty where there is none.
    """
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=uses_proxies(url)
    ) as client:
        return {kind.name: await _measured(client, metrics, kind) for kind in kinds}


def _client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=uses_proxies(url))


async def _measured(client: httpx.AsyncClient, metrics: Callable[[], str], kind: RequestClass) -> Alone:
    model, defaults = await _defaults(client, kind)
    await _one(client, kind, 0)
    before = rank_seconds(metrics())
    several = [await _one(client, kind, 1 + number) for number in range(NUM_LONE)]
    after = rank_seconds(metrics())
    num_steps = int(kind.body.get("num_inference_steps", defaults["num_inference_steps"]))
    size = kind.body.get("size", f"{defaults['width']}x{defaults['height']}")
    width, height = map(int, str(size).split("x"))
    return Alone(
        model=model,
        num_steps=num_steps,
        step_s=median(denoise_s for _, denoise_s in several) / num_steps,
        other_s=median(took_s - denoise_s for took_s, denoise_s in several),
        num_ranks=_busiest(before, after, model),
        width=width,
        height=height,
        num_frames=0 if "seconds" in kind.body else int(kind.body.get("num_frames", defaults["num_frames"])),
    )


async def _defaults(client: httpx.AsyncClient, kind: RequestClass) -> tuple[str, dict[str, Any]]:
    """The model of a class, by default the first one, and what is asked of it by default."""
    cards = (await client.get("/v1/models")).raise_for_status().json()["data"]
    wanted = kind.body.get("model", cards[0]["id"])
    found = next((card for card in cards if card["id"] == wanted), None)
    if found is None:
        raise ValueError(f"class {kind.name} asks for {wanted}; served: {', '.join(card['id'] for card in cards)}")
    return found["id"], found["defaults"]


async def _one(client: httpx.AsyncClient, kind: RequestClass, seed: int) -> tuple[float, float]:
    """Seconds in all, and of its steps."""
    began_s = asyncio.get_running_loop().time()
    answer = await answered(client, kind, seed)
    if answer.status != httpx.codes.OK:
        raise RuntimeError(f"a request of class {kind.name} alone was answered {answer.status}")
    return asyncio.get_running_loop().time() - began_s, answer.stages_ms["denoise"] / 1e3


async def made_ready(url: str, kinds: Sequence[RequestClass], headers: Mapping[str, str] = NO_HEADERS) -> None:
    """One request of each class, so that those after it find all that is made once for a size."""
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=uses_proxies(url)
    ) as client:
        for kind in kinds:
            await _one(client, kind, 0)


def rank_seconds(page: str) -> dict[tuple[str, int], float]:
    """What a page of metrics says of ranks in steps."""
    found: defaultdict[tuple[str, int], float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{STEPS}_sum":
                num_ranks = int(sample.labels["num_ranks"])
                found[sample.labels["model"], num_ranks] += sample.value * num_ranks
    return dict(found)


def _busiest(before: RankSeconds, after: RankSeconds, model: str) -> int:
    """The size of the team that most of the steps between were made on; 0 without metrics."""
    sizes = (size for name, size in after if name == model)
    return max(sizes, key=lambda size: _spent(before, after, (model, size)), default=0)


def _spent(before: RankSeconds, after: RankSeconds, key: tuple[str, int]) -> float:
    return after[key] - before.get(key, 0.0)


def with_ratios(alone: Mapping[str, Alone], folder: Path) -> dict[str, Alone]:
    """Returns the same with the ratios that the application's own measured times, kept in ``folder``, say."""
    return {
        name: one.model_copy(update={"ratios": {**one.ratios, **_ratios(one, folder)}}) for name, one in alone.items()
    }


def _ratios(one: Alone, folder: Path) -> dict[int, float]:
    """Of shapes of that size, several where prompts differ in length; the medians."""
    by_shape: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for (shape, num_ranks), step_s in _kept(one.model, folder).items():
        if _is_of(shape, one):
            by_shape[shape][num_ranks] = step_s
    found: defaultdict[int, list[float]] = defaultdict(list)
    for times_s in by_shape.values():
        for num_ranks in times_s.keys() - {one.num_ranks} if one.num_ranks in times_s else ():
            found[num_ranks].append(times_s[num_ranks] / times_s[one.num_ranks])
    return {num_ranks: median(ratios) for num_ranks, ratios in found.items()}


def _kept(model: str, folder: Path) -> Mapping[StepKey, float]:
    """The times of the newest file of ``model``."""
    name = re.compile(rf"{re.escape(model)}_[0-9a-f]+\.json")
    files = [file for file in folder.glob("*.json") if name.fullmatch(file.name)]
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return {} if newest is None else StepTimes(newest).prediction().measured


def _is_of(shape: str, one: Alone) -> bool:
    width, height, num_frames, *_ = ast.literal_eval(shape)
    return (width, height) == (one.width, one.height) and one.num_frames in (0, num_frames)
