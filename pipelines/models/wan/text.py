"""Cross-attention's keys and values: they depend on text and pictures alone, so a job makes them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.model import ModelInputs
from pipelines.models.wan.attention import cross_keys_and_values

PICTURES = "encoder_hidden_states_image"
KEYS_VALUES = "text_keys_values"
"""An input beside the module's own: (blocks, keys and values, B, T tokens of pictures and text, C), keys normalised."""


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the text's keys and values. The module must be whole.

    They take 420 MB for 512 tokens of the 14B model in bfloat16.
    """
    text_BTC: Tensor = module.condition_embedder.text_embedder(inputs["encoder_hidden_states"])
    if PICTURES in inputs:
        text_BTC = torch.cat((module.condition_embedder.image_embedder(inputs[PICTURES]), text_BTC), dim=1)
    keys_values_N2BTC = text_BTC.new_empty(len(module.blocks), 2, *text_BTC.shape)
    for keys_values_2BTC, block in zip(keys_values_N2BTC, module.blocks, strict=True):
        for target_BTC, x_BTC in zip(keys_values_2BTC, cross_keys_and_values(block.attn2, text_BTC), strict=True):
            target_BTC.copy_(x_BTC)
    return {KEYS_VALUES: keys_values_N2BTC}


def forward(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """The velocity, ``velocity_BCFHW``."""
    own = {name: x for name, x in call.items() if name != KEYS_VALUES}
    with text_replaced(module, call.get(KEYS_VALUES)):
        velocity_BCFHW: Tensor = module(**own, return_dict=False)[0]
    return velocity_BCFHW


@contextmanager
def text_replaced(module: Any, keys_values_N2BTC: Tensor | None) -> Iterator[None]:
    """Gives each block its keys and values in place of the text in the forwards of this context (None: the text)."""
    with ExitStack() as stack:
        if keys_values_N2BTC is not None:
            for block, x_2BTC in zip(module.blocks, keys_values_N2BTC, strict=True):
                stack.callback(block.register_forward_pre_hook(_in_place_of_text(x_2BTC)).remove)
        yield


def _in_place_of_text(x_2BTC: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda _block, args: (args[0], x_2BTC, *args[2:])
