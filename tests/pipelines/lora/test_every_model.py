"""Check adapters on every model with blocks: alternating jobs with and without one equal diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.lora.source import LoraLimits, LoraSource
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.every_model import MODELS, latents_of, painted
from tests.pipelines.lora.support.jobs import NONE, ONE, TOLERANCE, folder_of
from tests.pipelines.lora.support.tiny_lora import loader, write_lora

SCALE = ONE[0].scale
TOGETHER = ("cosmos 3", "sd 3")
"""Models that the quick tests also run on two ranks."""
CASES = [
    pytest.param(name, num_ranks, marks=[] if name in names else [pytest.mark.slow])
    for num_ranks, names in ((1, [name for name, model in MODELS.items() if not model.is_long]), (2, TOGETHER))
    for name, model in MODELS.items()
    if num_ranks == 1 or model.divided
]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A model, an adapter, and diffusers' latents without (0) and with it."""

    folder: Path
    adapter: Path
    later: str
    """Folder of the same adapter, added at run time."""
    own: Callable[[float], Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def written(folders: Callable[[Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def make(name: str) -> Written:
        model, top = MODELS[name], tmp_path_factory.mktemp("model")
        folder = folders(model.make)
        adapter = write_lora(folder, top / "adapter", seed=1)

        @cache
        def own(scale: float) -> Mapping[str, Tensor]:
            request = model.request(folder)
            with model.world():
                change = loader({adapter: scale} if scale else {})
                return latents_of(model.reference(folder, request, model.images(request), change))

        return Written(folder=folder, adapter=adapter, later=folder_of(adapter, top / "later"), own=own)

    return make


def differences(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[float]:
    assert set(mine) >= set(other)
    return [relative_difference(mine[name], latents) for name, latents in other.items()]


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_jobs_in_turns_equal_diffusers(name: str, num_ranks: int, written: Callable[[str], Written]) -> None:
    """The adapter is in the configuration, or added at run time."""
    here = written(name)
    named, later = (LoraSource(name="one", path=str(here.adapter)),), (replace(ONE[0], name="new", folder=here.later),)
    turns, bare = (
        gang(num_ranks).run(painted, name, here.folder, sources, mixes, limits)
        for sources, mixes, limits in ((named, (NONE, ONE, later), LoraLimits()), ((), (NONE,), None))
    )
    for (plain, one, new), (without,) in zip(turns, bare, strict=True):
        assert max(differences(plain, here.own(0.0))) <= TOLERANCE
        assert max(differences(one, here.own(SCALE))) <= TOLERANCE
        assert min(differences(one, plain)) > 0.02, "the adapter is there"
        assert all(plain[key].equal(latents) for key, latents in without.items()), "nothing of other jobs is left"
        assert all(new[key].equal(latents) for key, latents in one.items())


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.is_long])
@pytest.mark.slow
def test_one_that_is_always_there_equals_diffusers(name: str, written: Callable[[str], Written]) -> None:
    here = written(name)
    (latents,) = painted(name, here.folder, (LoraSource(path=str(here.adapter), scale=SCALE),), (NONE,))
    assert max(differences(latents, here.own(SCALE))) <= TOLERANCE
