"""FLUX.2's transformer as a hand-ordered step, equal to ``Flux2Transformer2DModel.forward`` without cached pictures.

Nothing has a bias, MLPs are gated (SwiGLU), and all blocks of a kind share their modulation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Arguments, ModelInputs, Precision
from engines.fast.blocks import Blocks, DualBlock, SingleBlock
from pipelines.models.block_weights import (
    dual_vectors,
    joint_norms,
    joint_projections,
    norms,
    pair,
    part_gemm,
    vectors_of,
)
from pipelines.models.mmdit import MMDiTWeights, pair_rotation


class Flux2Weights(MMDiTWeights):
    """A ``Flux2Transformer2DModel``; single-stream blocks' one projection is used as two."""

    shares_vectors = True

    def __init__(self, transformer: nn.Module, precision: Precision) -> None:
        super().__init__(transformer, arrange_blocks(transformer, precision))

    def rotations(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        all_ids = (arguments[name] for name in ("txt_ids", "img_ids"))
        text, image = (self.module.pos_embed(ids[0] if ids.ndim == 3 else ids) for ids in all_ids)
        return pair_rotation(text), pair_rotation(image)

    def embedded_times(self, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
        latents = inputs["hidden_states"]
        steps, batch = timesteps_SB.shape[0], latents.shape[0]
        times_X = timesteps_SB.to(latents.dtype).expand(steps, batch).flatten() * 1000
        guidance = inputs.get("guidance")
        guidance_X = None if guidance is None else guidance.to(latents.dtype).expand(steps, batch).flatten() * 1000
        temb_XC: Tensor = self.module.time_guidance_embed(times_X, guidance_X)
        return temb_XC.view(steps, batch, -1)

    def vectors(self, temb_XC: Tensor) -> Tensor:
        module, active_XC = self.module, functional.silu(temb_XC)
        dual = (module.double_stream_modulation_txt.linear, module.double_stream_modulation_img.linear)
        others = (module.single_stream_modulation.linear, module.norm_out.linear)
        return torch.cat((dual_vectors(*dual, active_XC), *(vectors_of(linear, active_XC) for linear in others)))


@torch.no_grad()
def arrange_blocks(transformer: nn.Module, precision: Precision) -> Blocks:
    duals, singles = (transformer.get_submodule(name) for name in ("transformer_blocks", "single_transformer_blocks"))
    return Blocks(
        duals=tuple(_dual(block, precision) for block in duals.children()),
        singles=tuple(_single(block.attn, precision) for block in singles.children()),
        precision=precision,
    )


def _dual(block: Any, precision: Precision) -> DualBlock:
    attn, text, image = block.attn, block.ff_context, block.ff
    return DualBlock(
        qkv=joint_projections(attn, precision),
        out=pair(attn.to_add_out, attn.to_out[0], precision),
        up=pair(text.linear_in, image.linear_in, precision, "swiglu"),
        down=pair(text.linear_out, image.linear_out, precision),
        head_norms_S2D=joint_norms(attn),
    )


def _single(attn: Any, precision: Precision) -> SingleBlock:
    into, out = attn.to_qkv_mlp_proj, attn.to_out
    num_qkv, channels = 3 * attn.inner_dim, attn.inner_dim
    return SingleBlock(
        qkv=part_gemm(into, precision, rows=slice(num_qkv)),
        up=part_gemm(into, precision, "swiglu", rows=slice(num_qkv, None)),
        out_mlp=part_gemm(out, precision, columns=slice(channels, None)),
        out_attention=part_gemm(out, precision, columns=slice(channels)),
        head_norms_S2D=norms(attn.norm_q, attn.norm_k)[None],
    )
