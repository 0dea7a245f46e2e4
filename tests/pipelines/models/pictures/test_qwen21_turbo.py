"""Qwen-Image 2.1's distilled form against the pipeline's own call."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.parallel.self_check import relative_difference
from tests.engines.support.gloo import gang
from tests.pipelines.models.pictures.test_qwen21 import TOLERANCE, denoised, own_latents
from tests.pipelines.support.references.picture_cases import PictureCase
from tests.pipelines.support.tiny_qwen import TURBO_SIGMAS, qwen21_turbo

CASE = PictureCase(make=qwen21_turbo, num_steps=len(TURBO_SIGMAS), pictures=())


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "ulysses"), (2, "tensor")])
def test_latents_equal_the_pipelines_own(tmp_path: Path, num_ranks: int, strategy: str) -> None:
    folder = qwen21_turbo(tmp_path)
    expected = own_latents(folder, CASE)
    for latents in gang(num_ranks).run(denoised, folder, CASE, strategy):
        assert relative_difference(latents, expected) <= TOLERANCE
