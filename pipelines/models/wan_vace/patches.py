"""Patches of diffusers' blocks for Wan VACE: one transformer instead of two, and a control clip in its dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import WanVACETransformer3DModel
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, ConfigSpec, InputParam
from diffusers.modular_pipelines.wan.before_denoise import WanVaceAdditionalInputsStep
from diffusers.modular_pipelines.wan.denoise import Wan22LoopDenoiser
from torch import Tensor

from pipelines.blocks.tree import replace_blocks
from pipelines.models.wan_vace.spec import CONTROL, SCALES

FOR_TRANSFORMER = "denoiser_input_fields"
"""Diffusers' name of the values that the loop passes on to the transformer."""
SECOND = "_2"


class ControlInDtype(WanVaceAdditionalInputsStep):  # type: ignore[misc]  # diffusers has no types
    """Cast the encoded clip once a job: the loop would make a new tensor of it in every call."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, *(InputParam(name, required=True) for name in (CONTROL, SCALES, "dtype"))]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        super().__call__(components, state)
        for name in (CONTROL, SCALES):
            state.set(name, state.get(name).to(state.get("dtype")), FOR_TRANSFORMER)
        return components, state


class OneTransformerDenoiser(Wan22LoopDenoiser):  # type: ignore[misc]
    """Call the same transformer in every step, with one guider (Wan 2.1)."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [part for part in super().expected_components if not part.name.endswith(SECOND)]

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        return []

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        alone = SimpleNamespace(
            config=SimpleNamespace(boundary_ratio=0.0),
            num_train_timesteps=components.num_train_timesteps,
            transformer=components.transformer,
            guider=components.guider,
        )
        _, block_state = super().__call__(alone, block_state, i=i, t=t)
        return components, block_state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, WanVaceAdditionalInputsStep, ControlInDtype)


def keep_one_transformer(blocks: Any) -> None:
    replace_blocks(blocks, Wan22LoopDenoiser, lambda: OneTransformerDenoiser(transformer_cls=WanVACETransformer3DModel))
