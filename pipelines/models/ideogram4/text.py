"""Ideogram 4's text: projected once a job, and behind it zeros for the picture's tokens.

diffusers packs the text's features for all tokens, 53,248 numbers each: 7 GB in float32 for both transformers at
2048 x 2048. All but the text's are zeros, and masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import ModelInputs

FEATURES, TEXT = "encoder_hidden_states", "text_BTC"
LAYERS = ("llm_cond_norm", "llm_cond_proj")
"""Submodules that read the features, in their order."""


def hoisted(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the projected text. Its shape is (batch, text tokens, channels)."""
    text_BTC: Tensor = module.llm_cond_proj(module.llm_cond_norm(inputs[FEATURES]))
    return {TEXT: text_BTC}


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return the velocities of all tokens, (batch, tokens, channels). ``call`` has features of the text alone."""
    own = dict(call)
    features_BTF, text_BTC = own.pop(FEATURES), own.pop(TEXT, None)
    if text_BTC is None:
        text_BTC = hoisted(module, {FEATURES: features_BTF})[TEXT]
    num_others = call["hidden_states"].shape[1] - text_BTC.shape[1]
    text_BLC = functional.pad(text_BTC, (0, 0, 0, num_others))
    with _without_layers(module):
        velocity_BLC: Tensor = module(**own, **{FEATURES: text_BLC}, return_dict=False)[0]
    return velocity_BLC


@contextmanager
def _without_layers(module: nn.Module) -> Iterator[None]:
    """Have ``module`` take projected text in this context."""
    layers = {name: module.get_submodule(name) for name in LAYERS}
    for name in layers:
        setattr(module, name, nn.Identity())
    try:
        yield
    finally:
        for name, layer in layers.items():
            setattr(module, name, layer)
