"""Qwen-Image equals ``diffusers.QwenImagePipeline`` as its card calls it: with a negative prompt of one space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.size import Size
from tests.pipelines.support.checkpoints.tiny_qwen import qwen
from tests.pipelines.support.references.pairs import Pair

CARD = " "


@pytest.fixture(scope="module")
def pair(folders: Callable[[Any], Path]) -> Pair:
    return Pair(folders(qwen))


@pytest.fixture(scope="module")
def silent(folders: Callable[[Any], Path]) -> MediaRequest:
    """Return the default request, without a negative prompt."""
    size = Size(width=48, height=32)
    return Checkpoint(folders(qwen)).defaults.request(size, prompt="a red circle", num_inference_steps=2, seed=5)


def test_who_says_nothing_gets_what_the_card_gives(pair: Pair, silent: MediaRequest) -> None:
    assert (silent.true_cfg_scale, silent.negative_prompt) == (4.0, None)
    ours, alone = pair.pixels(silent)
    _, card = pair.pixels(replace(silent, negative_prompt=CARD))
    assert np.abs(ours - card).max() <= 1e-4
    assert np.abs(card - alone).max() > 1e-2, "without a negative prompt diffusers' pipeline does not guide"


@pytest.mark.parametrize("changes", [{"true_cfg_scale": 1.0}, {"negative_prompt": ""}, {"negative_prompt": "blue"}])
def test_what_is_said_is_what_diffusers_is_told(pair: Pair, silent: MediaRequest, changes: dict[str, Any]) -> None:
    ours, theirs = pair.pixels(replace(silent, **changes))
    assert np.abs(ours - theirs).max() <= 1e-4
