"""FLUX.1's transformer as a hand-ordered step, equal to ``FluxTransformer2DModel.forward``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Arguments, ModelInputs, Precision
from engines.fast.blocks import Blocks, SingleBlock
from pipelines.models.block_weights import dual_block, dual_vectors, gemm, norms, part_gemm, stacked, vectors_of
from pipelines.models.mmdit import MMDiTWeights, pair_rotation


class FluxWeights(MMDiTWeights):
    """A ``FluxTransformer2DModel``, whose query, key and value weights become views of stacked ones."""

    def __init__(self, transformer: nn.Module, precision: Precision) -> None:
        super().__init__(transformer, arrange_blocks(transformer, precision))

    def rotations(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        text, image = (pair_rotation(self.module.pos_embed(arguments[ids])) for ids in ("txt_ids", "img_ids"))
        return text, image

    def embedded_times(self, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
        pooled_BC, dtype = inputs["pooled_projections"], inputs["hidden_states"].dtype
        steps, batch = timesteps_SB.shape[0], pooled_BC.shape[0]
        times = [timesteps_SB.to(dtype).expand(steps, batch).flatten() * 1000]
        if "guidance" in inputs:
            times.append(inputs["guidance"].to(dtype).repeat(steps) * 1000)
        temb_XC: Tensor = self.module.time_text_embed(*times, pooled_BC.repeat(steps, 1))
        return temb_XC.view(steps, batch, -1)

    def vectors(self, temb_XC: Tensor) -> Tensor:
        module, active_XC = self.module, functional.silu(temb_XC)
        parts = [
            dual_vectors(block.norm1_context.linear, block.norm1.linear, active_XC)
            for block in module.transformer_blocks
        ]
        parts += [vectors_of(block.norm.linear, active_XC) for block in module.single_transformer_blocks]
        return torch.cat((*parts, vectors_of(module.norm_out.linear, active_XC)))


@torch.no_grad()
def arrange_blocks(transformer: nn.Module, precision: Precision) -> Blocks:
    duals, singles = (transformer.get_submodule(name) for name in ("transformer_blocks", "single_transformer_blocks"))
    return Blocks(
        duals=tuple(dual_block(block.attn, block.ff_context, block.ff, precision) for block in duals.children()),
        singles=tuple(_single(block, precision) for block in singles.children()),
        precision=precision,
    )


def _single(block: Any, precision: Precision) -> SingleBlock:
    attn, out = block.attn, block.proj_out
    channels = out.out_features
    return SingleBlock(
        qkv=stacked((attn.to_q, attn.to_k, attn.to_v), precision),
        up=gemm(block.proj_mlp, precision),
        out_mlp=part_gemm(out, precision, columns=slice(channels, None), bias_N=out.bias),
        out_attention=part_gemm(out, precision, columns=slice(channels)),
        head_norms_S2D=norms(attn.norm_q, attn.norm_k)[None],
    )
