"""FLUX as a hand-ordered step on the module's own parameters, equal to ``FluxTransformer2DModel.forward``.

What differs is order and grouping. Modulation vectors, rotary tables and the embedded text do not depend on the latents
and are computed ahead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.core.fast_model import Precision, StepTensors
from engines.core.model import ModelInputs
from engines.fast.blocks_step import BlocksStep
from engines.fast.interface import StepParts
from pipelines.fast.flux_modulation import FluxModulation, embedded_times, modulation_vectors
from pipelines.fast.flux_weights import arranged_blocks


class FluxWeights:
    """A ``FluxTransformer2DModel`` arranged for ``FastFlux``; it keeps working. Implements ``FastWeights``."""

    def __init__(self, transformer: nn.Module, precision: Precision) -> None:
        self.module: Any = transformer
        self.blocks = arranged_blocks(transformer, precision)

    def model(self, parts: StepParts) -> FastFlux:
        return FastFlux(self, parts)

    def scheduled(self, inputs: ModelInputs, timesteps_SB: Tensor) -> dict[str, Tensor]:
        temb_SBC = embedded_times(self.module, inputs, timesteps_SB)
        num_steps, batch, _ = temb_SBC.shape
        vectors_VXC = modulation_vectors(self.module, temb_SBC.flatten(0, 1))
        vectors_VSBC = vectors_VXC.view(vectors_VXC.shape[0], num_steps, batch, -1)
        return {"modulation_VBC": vectors_VSBC.transpose(0, 1).contiguous()}


class FastFlux:
    """One step over my tokens. Implements ``FastModel``."""

    def __init__(self, weights: FluxWeights, parts: StepParts) -> None:
        self._weights, self._parts = weights, parts

    def ahead(self, inputs: ModelInputs) -> dict[str, Tensor]:
        module = self._weights.module
        cos_LD, sin_LD = module.pos_embed(torch.cat((inputs["txt_ids"], inputs["img_ids"])))
        text_BTC = module.context_embedder(inputs["encoder_hidden_states"])
        return {
            "text_TBC": text_BTC.transpose(0, 1).contiguous(),
            "cos_LP": cos_LD[:, ::2].float().contiguous(),
            "sin_LP": sin_LD[:, ::2].float().contiguous(),
        }

    def step(self, latents: Tensor, ahead: StepTensors) -> Tensor:
        """Returns ``velocity_BSD`` of my image tokens from ``latents_BSD``."""
        module, text_TBC = self._weights.module, ahead["text_TBC"]
        image_SBC = module.x_embedder(latents.transpose(0, 1))
        x_RC = torch.cat((text_TBC, image_SBC)).flatten(0, 1)
        velocity_RD: Tensor = module.proj_out(self._blocks_step(ahead).run(x_RC))
        return velocity_RD.view(-1, text_TBC.shape[1], velocity_RD.shape[-1]).transpose(0, 1).contiguous()

    def _blocks_step(self, ahead: StepTensors) -> BlocksStep:
        blocks, (num_text, batch, _) = self._weights.blocks, ahead["text_TBC"].shape
        vectors_VBC = ahead["modulation_VBC"]
        return BlocksStep(
            blocks=blocks,
            parts=self._parts,
            modulation=FluxModulation(vectors_VBC, len(blocks.duals), len(blocks.singles), num_text * batch),
            cos_LP=ahead["cos_LP"],
            sin_LP=ahead["sin_LP"],
            batch=batch,
        )
