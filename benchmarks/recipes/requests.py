"""Requests for the same picture or clip in several ways, and what their answers say."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from benchmarks.application.client import STAGES, Client, data_of, timing
from benchmarks.results import Spread
from benchmarks.serving.application import Application
from deployments.config import ServeConfig

PLAIN = "plain"
"""The way without a recipe."""
MAX_PIXEL = 255.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A picture or clip, and the milliseconds of its stages."""

    way: str
    data: bytes
    stages: Mapping[str, float]
    ended_s: float

    @property
    def denoise_ms(self) -> float:
        return self.stages["denoise"]


@dataclass(kw_only=True)
class Served:
    """The application, and the form of requests for its only model."""

    application: Application
    client: Client
    config: ServeConfig
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Size of a request."""
    num_steps: int = 0
    """Steps of ways without a number of steps; 0: the model's default."""
    repeats: int = 3
    firsts: dict[str, Made] = field(default_factory=dict)
    """The first answer of each way."""

    @cached_property
    def card(self) -> Mapping[str, Any]:
        return self.client.card()

    @property
    def recipes(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of the recipes by name, as the application lists them."""
        return self.card["recipes"]  # type: ignore[no-any-return]

    @property
    def with_adapters(self) -> list[str]:
        """Recipes that change weights."""
        return [name for name, settings in self.recipes.items() if settings.get("lora")]

    def steps_of(self, way: str) -> int:
        return self._own_steps(way) or self.num_steps or int(self.card["defaults"]["num_inference_steps"])

    def make(self, way: str = PLAIN, **fields: Any) -> Made:
        """Make the picture or clip in one way: a recipe, or ``fields`` under another name. RuntimeError if it fails."""
        asked: dict[str, Any] = {**self.fields}
        if way in self.recipes:
            asked["recipe"] = way
        if self.num_steps and not self._own_steps(way):
            asked["num_inference_steps"] = self.num_steps
        answer = self.client.make(self.card["kind"], **{**asked, **fields})
        made = Made(way=way, data=data_of(answer), stages=timing(answer), ended_s=time.perf_counter())
        self.firsts.setdefault(way, made)
        return made

    def make_each(self, ways: Sequence[str]) -> tuple[float, list[Made]]:
        """Make all at once. Return the seconds of all, and each by the time of its end."""
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(len(ways)) as pool:
            made = list(pool.map(self.make, ways))
        return time.perf_counter() - begin_s, sorted(made, key=lambda one: one.ended_s)

    def are_same(self, made: Iterable[Made]) -> bool:
        """Return whether all have the bytes of the first in their way."""
        return all(one.data == self.firsts[one.way].data for one in made)

    def _own_steps(self, way: str) -> int:
        """Return the recipe's number of steps; 0 if it has none."""
        own = self.recipes.get(way, {})
        return len(own.get("sigmas") or own.get("timesteps") or ()) or int(own.get("num_inference_steps") or 0)


def psnr_db(data: bytes, other: bytes) -> float | None:
    """Return the likeness of two pictures or clips; None for equal ones. RuntimeError if one has a single colour."""
    frames, others = frames_of(data), frames_of(other)
    for one in (frames, others):
        if one.std() == 0:
            raise RuntimeError("the picture has one colour: its values were not finite, or too large")
    error = float(np.mean(np.square(frames - others)))
    return round(10 * math.log10(MAX_PIXEL**2 / error), 2) if error else None


def are_equal(data: bytes, other: bytes) -> bool:
    """Return whether two pictures or clips have the same pixels."""
    return np.array_equal(frames_of(data), frames_of(other))


def frames_of(data: bytes) -> NDArray[np.float32]:
    """Return a picture's or a clip's pixels, shape (frames, height, width, 3)."""
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.float32)


def medians(made: Sequence[Made]) -> dict[str, Any]:
    """Return median and spread of each stage, in milliseconds."""
    return {stage: Spread.of([one.stages[stage] for one in made]).rounded(1) for stage in STAGES}
