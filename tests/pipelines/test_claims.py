"""Plans allow more than dividing the tokens: branches at once, both divisions of tokens, and stages.

The reference is the pipeline's own call, on gangs of Gloo ranks; each model's other tests cover the strategies of one
kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CASES, TOLERANCE, Case, request_of
from tests.pipelines.models.test_video import CLIPS, largest_difference
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.references.own_call import own_latents
from tests.pipelines.support.references.video import Clip, Latents, counted, denoised_from, encoded, pictures_of


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of another test. ``guided``: its steps have two branches; ``staged``: its plan allows stages."""

    like: Case | Clip
    guided: bool = True
    staged: bool = False

    @property
    def divisions(self) -> tuple[tuple[int, str], ...]:
        guidance = ((2, "guidance"), (4, "guidance")) if self.guided else ()
        stages = ((2, "pipeline"), (4, "pipeline2xulysses2")) if self.staged else ()
        return ((4, "hybrid"), *guidance, *stages)

    def request(self, folder: Path) -> MediaRequest:
        return request_of(self.like, folder) if isinstance(self.like, Case) else self.like.request(folder)

    def images(self, request: MediaRequest) -> tuple[Image.Image, ...]:
        return () if isinstance(self.like, Case) else self.like.images(request)

    def own(self, folder: Path) -> Latents:
        if isinstance(self.like, Case):
            return {"latents": own_latents(folder, self.request(folder))}
        return self.like.own(folder)


SUBJECTS = {
    "flux": Subject(like=Case(make=tiny.flux), guided=False, staged=True),
    "flux2 klein": Subject(like=CASES["flux2 klein"], guided=False),
    "qwen": Subject(like=CASES["qwen"], staged=True),
    "z image": Subject(like=CASES["z image with guidance"]),
    "krea 2": Subject(like=CASES["krea 2"]),
    "ernie": Subject(like=CASES["ernie"]),
    "sd 3": Subject(like=CASES["sd 3"]),
    "sd 3.5 large": Subject(like=CASES["sd 3.5 large"]),
    "wan": Subject(like=CLIPS["wan 2.1 from a picture"], staged=True),
    "ltx": Subject(like=CLIPS["ltx from words"], staged=True),
    "hunyuan": Subject(like=CLIPS["hunyuan from words"], staged=True),
}
FAST = {("qwen", 2, "guidance"), ("hunyuan", 2, "pipeline")}
"""Quick runs have the comparison and its control for these."""
BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "hybrid": ("strategies.start_rotation", lambda x, axis: x.clone()),
    "guidance": ("division.all_gather", lambda x, axis: torch.stack([x] * axis.size)),
    "pipeline": ("pipeline.broadcast", lambda x, axis, source: x),
}
"""The exchange of each, replaced by a silent no-op of the right shape."""


EVERY = [(name, *division) for name, subject in SUBJECTS.items() for division in subject.divisions]
CONTROLS = [one for one in EVERY if one[2] in BROKEN and one[1:] != (4, "guidance")]


def marked(several: list[tuple[str, int, str]]) -> list[Any]:
    return [pytest.param(*one, marks=() if one in FAST else pytest.mark.slow) for one in several]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: SUBJECTS[name].like.make(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(folders: Callable[[str], Path]) -> Callable[[str], Latents]:
    return cache(lambda name: SUBJECTS[name].own(folders(name)))


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes, strategy: str) -> dict[str, Any]:
    where, instead = BROKEN[strategy]
    with patch(f"engines.parallel.{where}", instead):
        return denoised_from(folder, request, conditioning, strategy)


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), marked(EVERY))
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folders: Callable[[str], Path], expected: Callable[[str], Latents]
) -> None:
    subject, folder = SUBJECTS[name], folders(name)
    request = subject.request(folder)
    conditioning = encoded(folder, request, pictures_of(subject.images(request)))
    for latents, num_forwards in gang(num_ranks).run(counted, folder, request, conditioning, strategy):
        assert largest_difference(latents, expected(name)) <= TOLERANCE
        num_branches = 2 if subject.guided and strategy != "guidance" else 1
        assert num_forwards == num_branches * request.num_inference_steps, "two at once are one for each rank"


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), marked(CONTROLS))
def test_without_the_exchange_they_do_not(
    name: str, num_ranks: int, strategy: str, folders: Callable[[str], Path], expected: Callable[[str], Latents]
) -> None:
    subject, folder = SUBJECTS[name], folders(name)
    request = subject.request(folder)
    answers = gang(num_ranks).run(
        without_exchange, folder, request, encoded(folder, request, pictures_of(subject.images(request))), strategy
    )
    assert max(largest_difference(latents, expected(name)) for latents in answers) > 10 * TOLERANCE


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_plan_says_which_have_stages(name: str, folders: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(folders(name))
    assert bool(checkpoint.outline().plan.carried) == SUBJECTS[name].staged
