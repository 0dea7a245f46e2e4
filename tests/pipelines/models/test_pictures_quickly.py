"""Quick runs sample the slow comparisons of pictures: jobs on two ranks equal diffusers' own call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.core.tensors import relative_difference
from tests.engines.support.gloo import gang
from tests.pipelines.models import test_picture_inputs, test_video
from tests.pipelines.support.references.video import denoised_from, encoded, pictures_of

EDITS = [
    ("flux kontext", "ring"),
    ("flux2 dev, one picture", "tensor"),
    ("qwen edit", "allgather_kv"),
]
TOLERANCE = 1e-4
"""Relative, in float32: sums are added in another order."""


@pytest.mark.parametrize(("name", "strategy"), EDITS)
def test_an_edit_on_two_ranks_equals_the_pipelines_own(
    name: str, strategy: str, folders: Callable[[Any], Path]
) -> None:
    folder = folders(test_picture_inputs.CASES[name].make)
    expected = test_picture_inputs.expected_of(name, folder)
    for latents in gang(2).run(test_picture_inputs.denoised, folder, name, strategy):
        assert relative_difference(latents, expected) <= TOLERANCE


def test_a_clip_from_a_picture_on_two_ranks_equals_diffusers(folders: Callable[[Any], Path]) -> None:
    clip = test_video.CLIPS["wan 2.1 from a picture"]
    folder = folders(clip.make)
    request, expected = clip.request(folder), clip.own(folder)
    for latents in gang(2).run(
        denoised_from, folder, request, encoded(folder, request, pictures_of(clip.images(request))), "ulysses"
    ):
        assert relative_difference(latents["latents"], expected["latents"]) <= TOLERANCE
