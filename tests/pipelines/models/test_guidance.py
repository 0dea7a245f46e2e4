"""Requests may have classifier-free guidance only where the model's blocks compute it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.checkpoint import Checkpoint
from tests.pipelines.support.checkpoints import tiny_cosmos, tiny_flux3, tiny_minimax, tiny_others, tiny_pictures

UNGUIDED = {
    "minimax h3": tiny_minimax.minimax_h3,
    "flux 3, distilled": tiny_flux3.flux3_distilled,
    "ideogram 4": tiny_others.ideogram4,
    "cosmos, distilled": tiny_cosmos.cosmos_distilled,
}


@pytest.mark.parametrize("name", UNGUIDED)
def test_a_model_whose_blocks_ignore_guidance_refuses_it(name: str, folders: Callable[[Any], Path]) -> None:
    """Else a negative prompt would be left out without a word."""
    defaults = Checkpoint(folders(UNGUIDED[name])).defaults
    assert defaults.request().true_cfg_scale == 1
    with pytest.raises(ValueError, match=r"true_cfg_scale is 2\.5; this model takes no classifier-free guidance"):
        defaults.request(true_cfg_scale=2.5, negative_prompt="blue")


@pytest.mark.parametrize("make", [tiny_pictures.flux2_dev, tiny_pictures.flux2_klein])
def test_models_without_a_guider_have_guidance_beside_a_negative_prompt_alone(
    make: Callable[[Path], Path], folders: Callable[[Any], Path]
) -> None:
    defaults = Checkpoint(folders(make)).defaults
    scales = [defaults.request(true_cfg_scale=2.5, negative_prompt=given).true_cfg_scale for given in (None, "blue")]
    assert scales == [1.0, 2.5]
