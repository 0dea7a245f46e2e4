"""LTX-2's four passes of guidance on parts of a gang of Gloo ranks equal diffusers' own call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipelines.request import MediaRequest
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.models.test_video import largest_difference
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.references import own_clips as own_clips
from tests.pipelines.support.references.video import Clip, Latents, counted, denoised_from, encoded, pictures_of

CLIP = Clip(make=tiny_ltx.ltx2, reference=own_clips.sounding_blocks)
CASES = {
    (4, "guidance4"): 1,
    (3, "guidance3"): 2,
    (2, "guidance"): 2,
    (4, "guidance"): 2,
    (4, "guidance2xring2"): 2,
}
"""Passes that each rank makes: one, or its share of three and of the last, or of two and two."""


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(CLIP.make)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Latents:
    return CLIP.reference(folder, CLIP.request(folder), ())


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes, strategy: str) -> dict[str, Any]:
    """Let each part of the team take its own prediction for those of all."""
    with patch("engines.parallel.division.all_gather", lambda x, axis: torch.stack([x] * axis.size)):
        return denoised_from(folder, request, conditioning, strategy)


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [pytest.param(*case, marks=() if case == (4, "guidance4") else pytest.mark.slow) for case in CASES],
)
def test_clip_and_sound_equal_diffusers(num_ranks: int, strategy: str, folder: Path, expected: Latents) -> None:
    request = CLIP.request(folder)
    assert all(latents.std() > 0.1 for latents in expected.values())
    for latents, num_forwards in gang(num_ranks).run(
        counted, folder, request, encoded(folder, request, pictures_of(())), strategy
    ):
        assert largest_difference(latents, expected) <= TOLERANCE
        assert num_forwards == CASES[num_ranks, strategy] * request.num_inference_steps


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_without_the_exchange_they_do_not(num_ranks: int, folder: Path, expected: Latents) -> None:
    request, strategy = CLIP.request(folder), f"guidance{num_ranks}"
    conditioning = encoded(folder, request, pictures_of(()))
    for latents in gang(num_ranks).run(without_exchange, folder, request, conditioning, strategy):
        assert largest_difference(latents, expected) > 10 * TOLERANCE
