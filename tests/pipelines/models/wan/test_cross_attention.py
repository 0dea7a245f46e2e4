"""What the text becomes in cross-attention, made once a job and given to every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from engines.core.model import Branch
from engines.torch_engine.engine import TorchEngine
from pipelines.models.wan.attention import forward, hoisted_text
from tests.engines.support import models


def branch_and_other() -> tuple[Branch, Branch]:
    """Two branches that differ in their text alone."""
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
