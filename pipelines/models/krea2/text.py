"""The layers of Krea 2 that fuse the text, computed once a job: no step changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models.transformers.transformer_krea2 import Krea2TextFusion
from torch import Tensor, nn

from engines.core.model import ModelInputs
from pipelines.models.krea2.spec import MASK
from pipelines.models.spec import first_output
from pipelines.models.text_keys import TEXT

FUSED = "fused_text"
"""Name of the fused text, an input beside the module's own."""


class FusedOnce(Krea2TextFusion):  # type: ignore[misc]
    """Diffusers' layers, which leave a text without a dim of layers unchanged: it is fused."""

    def forward(self, encoder_hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return ``text_BTC`` of the text (B, T, layers, C), or of itself."""
        if encoder_hidden_states.ndim == 3:
            return encoder_hidden_states
        text_BTC: Tensor = super().forward(encoder_hidden_states, attention_mask)
        return text_BTC


def replace_processors(module: nn.Module) -> None:
    module.get_submodule("text_fusion").__class__ = FusedOnce


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the fused text. 512 tokens take 2.6 MB in bfloat16."""
    mask_BT = inputs.get(MASK)
    return {FUSED: module.text_fusion(inputs[TEXT], None if mask_BT is None else mask_BT[:, None, None])}


def forward(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Return ``velocity_BLC``."""
    own = {name: x for name, x in call.items() if name != FUSED}
    return first_output(module, {**own, TEXT: call.get(FUSED, call[TEXT])})
