"""Qwen-Image's transformer as a hand-ordered step, equal to ``QwenImageTransformer2DModel.forward`` without a mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Arguments, ModelInputs, Precision
from engines.fast.blocks import Blocks
from pipelines.models.block_weights import dual_block, dual_vectors, vectors_of
from pipelines.models.mmdit import MMDiTWeights


class QwenWeights(MMDiTWeights):
    """A ``QwenImageTransformer2DModel`` with none of ``WITHOUT_FAST_STEP``."""

    def __init__(self, transformer: nn.Module, precision: Precision, window: int) -> None:
        super().__init__(transformer, arrange_blocks(transformer, precision))
        self.window = window

    def text(self, text_BTD: Tensor) -> Tensor:
        text_BTC: Tensor = self.module.txt_in(self.module.txt_norm(text_BTD))
        return text_BTC

    def image(self, latents_SBD: Tensor) -> Tensor:
        image_SBC: Tensor = self.module.img_in(latents_SBD)
        return image_SBC

    def rotations(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        num_text, device = arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].device
        image_SP, text_TP = self.module.pos_embed(arguments["img_shapes"], max_txt_seq_len=num_text, device=device)
        return _real_imaginary(text_TP), _real_imaginary(image_SP)

    def embedded_times(self, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
        latents = inputs["hidden_states"]
        steps, batch = timesteps_SB.shape[0], latents.shape[0]
        times_X = timesteps_SB.to(latents.dtype).expand(steps, batch).flatten()
        temb_XC: Tensor = self.module.time_text_embed(times_X, latents)
        return temb_XC.view(steps, batch, -1)

    def vectors(self, temb_XC: Tensor) -> Tensor:
        module, active_XC = self.module, functional.silu(temb_XC)
        parts = [dual_vectors(block.txt_mod[1], block.img_mod[1], active_XC) for block in module.transformer_blocks]
        return torch.cat((*parts, vectors_of(module.norm_out.linear, active_XC)))


@torch.no_grad()
def arrange_blocks(transformer: nn.Module, precision: Precision) -> Blocks:
    blocks = transformer.get_submodule("transformer_blocks").children()
    duals = (dual_block(block.attn, block.txt_mlp, block.img_mlp, precision) for block in blocks)
    return Blocks(duals=tuple(duals), singles=(), precision=precision)


def _real_imaginary(turns_LP: Tensor) -> Tensor:
    return torch.stack((turns_LP.real, turns_LP.imag)).float()
