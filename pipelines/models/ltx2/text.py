"""Attention to the text in LTX-2: keys and values are made once a job, and an open mask is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
    LTX2VideoTransformerBlock,
)
from diffusers.modular_pipelines.ltx2.before_denoise import LTX2TextInputStep
from torch import Tensor, nn

from engines.core.model import ModelInputs
from pipelines.models.text_keys import KEYS_VALUES, TEXT, replace_text, stacked_keys_values, with_keys

SOUND_TEXT, SOUND_KEYS_VALUES = "audio_encoder_hidden_states", "sound_text_keys_values"
"""Names of the text for the sound, in the module and its blocks, and of its keys and values."""
MASKS = ("connector_attention_mask", "negative_connector_attention_mask")
PROCESSORS = (LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor)
"""Processors of diffusers that ``TextProcessor`` replaces."""


class LTX2OpenTextStep(LTX2TextInputStep):  # type: ignore[misc]
    """Gives masks without tokens if every token may be attended to: connectors with registers leave no padding.

    Attention without a mask is faster. Blocks need a mask, which ``forward`` then leaves out. The values are read once
    a job.
    """

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        components, state = super().__call__(components, state)
        block_state = self.get_block_state(state)
        masks = {name: getattr(block_state, name) for name in MASKS}
        if all(mask.device.type == "meta" or bool(mask.all()) for mask in masks.values()):
            for name, mask in masks.items():
                setattr(block_state, name, mask[:, :0])
            self.set_block_state(state, block_state)
        return components, state


class TextProcessor(LTX2AudioVideoAttnProcessor):  # type: ignore[misc]
    """Attends to a text, or to its stacked keys and values."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, *others: Any) -> Tensor:
        """Attend. The names are those of diffusers."""
        attn, encoder_hidden_states = with_keys(attn, encoder_hidden_states)
        out_BLC: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, *others)
        return out_BLC


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the text's keys and values, for clip and sound.

    There are none if timesteps change the text (LTX-2.3). The module must be whole. Keys are normalised. All take
    1.2 GB for the 1024 tokens of LTX-2 in bfloat16.
    """
    if module.prompt_modulation:
        return {}
    clip_BTC, sound_BTC = inputs[TEXT], inputs[SOUND_TEXT]
    if module.config.use_prompt_embeddings:
        clip_BTC, sound_BTC = module.caption_projection(clip_BTC), module.audio_caption_projection(sound_BTC)
    return {
        KEYS_VALUES: stacked_keys_values([block.attn2 for block in module.transformer_blocks], clip_BTC),
        SOUND_KEYS_VALUES: stacked_keys_values([block.audio_attn2 for block in module.transformer_blocks], sound_BTC),
    }


def forward(module: Any, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return clip and sound. Masks without tokens are left out."""
    own = {name: x for name, x in call.items() if name not in (KEYS_VALUES, SOUND_KEYS_VALUES) and not _is_empty(x)}
    sound = replace_text(module.transformer_blocks, call.get(SOUND_KEYS_VALUES), name=SOUND_TEXT)
    with replace_text(module.transformer_blocks, call.get(KEYS_VALUES)), sound:
        outputs: tuple[Tensor, ...] = module(**own, return_dict=False)
    return outputs


def _is_empty(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 0


def read_keys(module: nn.Module) -> None:
    """Let attention to the text take its keys and values. No pass of guidance leaves it out."""
    for block in module.modules():
        if isinstance(block, LTX2VideoTransformerBlock):
            for attention in (block.attn2, block.audio_attn2):
                if type(attention.processor) in PROCESSORS:
                    attention.set_processor(TextProcessor())
