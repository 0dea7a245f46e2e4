"""The text's keys and values of cross-attention are made once a job and given to every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines.core.model import Branch
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.wan.attention import forward, hoisted_text
from pipelines.models.wan.spec import MAX_TOKENS, PICTURE_TOKENS
from tests.engines.support import models
from tests.pipelines.support.checkpoints import tiny_vace, tiny_video
from tests.pipelines.support.checkpoints.first_steps import first_step


def branch_and_other() -> tuple[Branch, Branch]:
    """Return two branches that differ in their text alone."""
    one, other = models.branches("wan", "even", num=2)
    return one, replace(one, inputs={**one.inputs, "encoder_hidden_states": other.inputs["encoder_hidden_states"]})


@torch.no_grad()
def test_the_step_is_the_same() -> None:
    module, (branch, _) = models.transformer("wan"), branch_and_other()
    expected = module(**branch.inputs, return_dict=False)[0]
    model = models.model("wan")
    whole = model.modules["transformer"]
    torch.testing.assert_close(forward(whole, {**branch.inputs, **hoisted_text(whole, branch.inputs)}), expected)
    torch.testing.assert_close(forward(whole, branch.inputs), expected)


@torch.no_grad()
def test_the_text_itself_is_read_no_more() -> None:
    whole, (branch, other) = models.model("wan").modules["transformer"], branch_and_other()
    mixed = forward(whole, {**other.inputs, **hoisted_text(whole, branch.inputs)})
    torch.testing.assert_close(mixed, forward(whole, branch.inputs))
    assert not torch.allclose(mixed, forward(whole, other.inputs))


@pytest.mark.parametrize(
    ("make", "num_tokens"),
    [
        (tiny_video.wan_picture, MAX_TOKENS + PICTURE_TOKENS),
        (tiny_video.wan_first_and_last, MAX_TOKENS + 2 * PICTURE_TOKENS),
        (tiny_vace.wan_vace, MAX_TOKENS),
    ],
)
@torch.no_grad()
def test_the_planner_counts_the_longest_text(make: Any, num_tokens: int, folders: Callable[[Any], Path]) -> None:
    folder = folders(make)
    model, (branch, *_) = Checkpoint(folder).denoiser(), first_step(folder)
    (x_N2BTC,) = hoisted_text(model.modules[branch.module], branch.arguments).values()
    assert x_N2BTC[..., 0, :].numel() * num_tokens == model.hoisted_numbers
    assert x_N2BTC.shape[3] == num_tokens or num_tokens == MAX_TOKENS, "texts beside pictures have the full length"


def test_an_engine_makes_it_once_for_each_text() -> None:
    model, (branch, other) = models.model("wan"), branch_and_other()
    engine = TorchEngine(model)
    transformer: Any = model.modules["transformer"]
    to_k = transformer.blocks[0].attn2.to_k
    with patch.object(to_k, "forward", wraps=to_k.forward) as projected:
        for step in range(3):
            latents = branch.inputs["hidden_states"] + step
            engine.predict(
                tuple(replace(x, inputs={**x.inputs, "hidden_states": latents}) for x in (branch, other)), (0,)
            )
        assert projected.call_count == 2
    engine.close()
