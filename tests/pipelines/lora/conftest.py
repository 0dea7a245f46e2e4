from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.lora.support.jobs import MODELS, Served
from tests.pipelines.lora.support.tiny_lora import write_lora
from tests.pipelines.support.checkpoints import tiny, tiny_hunyuan, tiny_minimax, tiny_models, tiny_others, tiny_unknown

SMALL: dict[str, Callable[[Path], Path]] = {
    "anima": tiny_unknown.anima,
    "flux": tiny.flux,
    "hunyuan": tiny_hunyuan.hunyuan_video,
    "ideogram": tiny_others.ideogram4,
    "klein": tiny_models.flux2_klein,
    "krea": tiny_others.krea2,
    "minimax": tiny_minimax.minimax_h3,
    "qwen": tiny_models.qwen_image,
    "sd3": tiny_others.sd3,
    "sdxl": tiny_unknown.sdxl,
    "wan": tiny.wan,
    "z": tiny_models.z_image,
}


@pytest.fixture(scope="session")
def small(folders: Callable[[Any], Path]) -> Callable[[str], Path]:
    """Return a function that makes a model's folder by its short name, once."""
    return lambda name: folders(SMALL[name])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Return a function that makes a model with two adapters once, so diffusers computes its latents once."""

    @cache
    def make(model: str) -> Served:
        top = tmp_path_factory.mktemp("model")
        folder = MODELS[model](top / "model")
        one = write_lora(folder, top / "one", seed=1)
        return Served(folder=folder, one=one, two=write_lora(folder, top / "two", seed=2, r=2, says_alpha=False))

    return make
