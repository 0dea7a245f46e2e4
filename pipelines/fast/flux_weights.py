"""A FLUX transformer's parameters arranged as the products of blocks: no copies, one view or stack each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.core.fast_model import Precision
from engines.fast.blocks import Blocks, DualBlock, Pair, SingleBlock
from engines.fast.gemm import Product, make_product, stack


@torch.no_grad()
def arranged_blocks(transformer: nn.Module, precision: Precision) -> Blocks:
    """Returns all blocks of a ``FluxTransformer2DModel``, whose query, key and value weights become views."""
    duals, singles = (transformer.get_submodule(name) for name in ("transformer_blocks", "single_transformer_blocks"))
    return Blocks(
        duals=tuple(_dual(block, precision) for block in duals.children()),
        singles=tuple(_single(block, precision) for block in singles.children()),
        precision=precision,
    )


def _dual(block: Any, precision: Precision) -> DualBlock:
    attn = block.attn
    text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    return DualBlock(
        qkv=Pair(_stacked(text, precision), _stacked((attn.to_q, attn.to_k, attn.to_v), precision)),
        out=Pair(_product(attn.to_add_out, precision), _product(attn.to_out[0], precision)),
        up=Pair(_product(block.ff_context.net[0].proj, precision), _product(block.ff.net[0].proj, precision)),
        down=Pair(_product(block.ff_context.net[2], precision), _product(block.ff.net[2], precision)),
        head_norms_S2D=torch.stack((_norms(attn.norm_added_q, attn.norm_added_k), _norms(attn.norm_q, attn.norm_k))),
    )


def _single(block: Any, precision: Precision) -> SingleBlock:
    attn, out = block.attn, block.proj_out
    channels = out.out_features
    return SingleBlock(
        qkv=_stacked((attn.to_q, attn.to_k, attn.to_v), precision),
        up=_product(block.proj_mlp, precision),
        out_mlp=make_product(out.weight[:, channels:], out.bias, precision),
        out_attention=make_product(out.weight[:, :channels], None, precision),
        head_norms_S2D=_norms(attn.norm_q, attn.norm_k)[None],
    )


def _stacked(linears: tuple[Any, ...], precision: Precision) -> Product:
    return make_product(*stack(linears), precision)


def _product(linear: Any, precision: Precision) -> Product:
    return make_product(linear.weight, linear.bias, precision)


def _norms(norm_q: Any, norm_k: Any) -> Tensor:
    return torch.stack((norm_q.weight, norm_k.weight))
