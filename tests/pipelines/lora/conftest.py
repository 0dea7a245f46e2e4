from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.pipelines.lora.support.jobs import MODELS, Served
from tests.pipelines.lora.support.tiny_lora import write_lora


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    @cache
    def make(model: str) -> Served:
        top = tmp_path_factory.mktemp("model")
        folder = MODELS[model](top / "model")
        one = write_lora(folder, top / "one", seed=1)
        return Served(folder=folder, one=one, two=write_lora(folder, top / "two", seed=2, r=2, says_alpha=False))

    return make
