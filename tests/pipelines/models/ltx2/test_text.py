"""The text's keys and values for clip and sound are made once a job; masks without effect are left empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines.core.model import Branch, DenoiserModel
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.ltx2.spec import MAX_TOKENS
from pipelines.models.ltx2.text import SOUND_TEXT, hoisted_text
from pipelines.models.text_keys import KEYS_VALUES, TEXT
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_ltx

MASK = "encoder_attention_mask"


def opened(folder: Path) -> tuple[DenoiserModel, tuple[Branch, ...]]:
    """Return the model, and the branches of a step with different texts and random latents."""
    checkpoint, generator = Checkpoint(folder, "cpu", torch.float32), torch.Generator().manual_seed(1)
    size = Size(width=96, height=64, num_frames=5)
    branches = checkpoint.first_step(checkpoint.defaults.request(size, true_cfg_scale=3.0, seed=1))
    filled = [
        {name: torch.randn(x.shape, generator=generator) if x.is_floating_point() else x for name, x in own.items()}
        for own in ({**branch.inputs, "timestep": branch.inputs["timestep"]} for branch in branches)
    ]
    return checkpoint.denoiser(), tuple(
        replace(branch, inputs=own, schedule=None) for branch, own in zip(branches, filled, strict=True)
    )


@torch.no_grad()
def test_the_step_is_that_of_diffusers(folders: Callable[[Any], Path]) -> None:
    model, (branch, other, *_) = opened(folders(tiny_ltx.ltx2_few_layers))
    (module,) = model.modules.values()
    hoisted = hoisted_text(module, branch.arguments)
    assert hoisted[KEYS_VALUES].shape[:2] == (2, 2)
    num_tokens = branch.inputs[TEXT].shape[1]
    made = sum(x.numel() for x in hoisted.values())
    assert made * MAX_TOKENS == model.hoisted_numbers * num_tokens, "the planner's count"
    assert branch.inputs[MASK].numel() == 0
    several = [model.forward(module, own) for own in ({**branch.arguments, **hoisted}, branch.arguments)]
    texts = {name: branch.inputs[name] for name in (TEXT, SOUND_TEXT)}
    mixed = model.forward(module, {**other.arguments, **texts})
    unread = model.forward(module, {**other.arguments, **hoisted})
    opened_mask = torch.ones(branch.inputs[TEXT].shape[:2])
    expected = model.forward(module, {**branch.arguments, MASK: opened_mask, f"audio_{MASK}": opened_mask})
    for output in several:
        torch.testing.assert_close(output, expected)
    torch.testing.assert_close(unread, mixed)
    assert not torch.allclose(mixed, model.forward(module, other.arguments))


@pytest.mark.parametrize(("attention", "text"), [("attn2", TEXT), ("audio_attn2", SOUND_TEXT)])
def test_an_engine_makes_it_once_for_each_text(attention: str, text: str, folders: Callable[[Any], Path]) -> None:
    model, branches = opened(folders(tiny_ltx.ltx2_few_layers))
    engine, (transformer,) = TorchEngine(model), model.modules.values()
    projection: Any = transformer.get_submodule(f"transformer_blocks.0.{attention}.to_k")
    with patch.object(projection, "forward", wraps=projection.forward) as projected:
        for step in range(3):
            latents = [branch.inputs["hidden_states"] + step for branch in branches]
            pairs = zip(branches, latents, strict=True)
            engine.predict(tuple(replace(x, inputs={**x.inputs, "hidden_states": y}) for x, y in pairs), (0,))
        assert projected.call_count == len({id(branch.inputs[text]) for branch in branches})
    engine.close()


@pytest.mark.parametrize("make", [tiny_ltx.ltx2_gated, tiny_ltx.ltx25])
def test_a_text_that_timesteps_change_is_left(make: Any, folders: Callable[[Any], Path]) -> None:
    model, (branch, *_) = opened(folders(make))
    (module,) = model.modules.values()
    assert hoisted_text(module, branch.arguments) == {}
    assert model.hoisted_numbers == 0
