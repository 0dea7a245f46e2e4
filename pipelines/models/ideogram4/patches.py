"""Patches of Ideogram 4's blocks: features of the text alone leave the encoder and reach the transformers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines.ideogram4.before_denoise import Ideogram4PrepareAdditionalInputsStep
from diffusers.modular_pipelines.ideogram4.encoders import Ideogram4TextEncoderStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from pipelines.blocks.tree import replace_blocks

FEATURES, LENGTHS = "text_features", "text_lengths"
PROMPT, NEGATIVE = "prompt_embeds", "negative_prompt_embeds"
SEGMENTS = ("segment_ids", "negative_segment_ids")


class UnpaddedText(Ideogram4TextEncoderStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that pads every prompt to 2048 tokens, on the left: its features take 436 MB in float32."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        components, state = super().__call__(components, state)
        state.set(FEATURES, state.get(FEATURES)[:, -max(state.get(LENGTHS)) :].contiguous())
        return components, state


class UnpackedText(Ideogram4PrepareAdditionalInputsStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that gives the picture's tokens features, too: zeros, of which ``text.forward`` needs none.

    The second transformer gets one token of zeros, since kernels take no empty tensor. It is masked. One segment id is
    left: all tokens are of one picture, and no mask is needed.
    """

    def __call__(self, components: Any, state: PipelineState) -> Any:
        features_BTF = state.get(FEATURES)
        state.set(FEATURES, features_BTF[..., :0])
        components, state = super().__call__(components, state)
        # In the transformers' dtype: each step would cast them anew, and engines know a job's tensors by identity.
        prompt_BTF = features_BTF.to(components.transformer.dtype)
        blank_B1F = torch.zeros_like(features_BTF[:, :1], dtype=components.unconditional_transformer.dtype)
        for name, value in ((FEATURES, features_BTF), (PROMPT, prompt_BTF), (NEGATIVE, blank_B1F)):
            state.set(name, value)
        for name in SEGMENTS:
            state.set(name, state.get(name)[:, :1])
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, Ideogram4TextEncoderStep, UnpaddedText)
    replace_blocks(blocks, Ideogram4PrepareAdditionalInputsStep, UnpackedText)
