"""Linear layers of a transformer as the GEMMs of blocks: no copies, one view or stack each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.core.fast_model import Precision
from engines.fast.blocks import Pair
from engines.fast.gemm import ALL, Activation, Gemm, WeightPart, make_gemm, stack


def gemm(linear: Any, precision: Precision, activation: Activation = "gelu") -> Gemm:
    return make_gemm(linear.weight, linear.bias, precision, activation, parts=(WeightPart(parameter=linear.weight),))


def part_gemm(
    linear: Any,
    precision: Precision,
    activation: Activation = "gelu",
    *,
    rows: slice = ALL,
    columns: slice = ALL,
    bias_N: Tensor | None = None,
) -> Gemm:
    """Returns one for some outputs or some inputs of ``linear``, with the bias that is given."""
    part = WeightPart(parameter=linear.weight, rows=rows, columns=columns)
    return make_gemm(part.of(linear.weight), bias_N, precision, activation, parts=(part,))


def stacked(linears: Sequence[Any], precision: Precision, activation: Activation = "gelu") -> Gemm:
    """Returns one GEMM for all ``linears``, whose parameters become views of its own."""
    parts = [WeightPart(parameter=linear.weight) for linear in linears]
    return make_gemm(*stack(linears), precision, activation, parts=parts)


def pair(text: Any, image: Any, precision: Precision, activation: Activation = "gelu") -> Pair:
    return Pair(gemm(text, precision, activation), gemm(image, precision, activation))


def joint_projections(attn: Any, precision: Precision) -> Pair:
    """Returns those to queries, keys and values of diffusers' joint attention."""
    text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    return Pair(stacked(text, precision), stacked((attn.to_q, attn.to_k, attn.to_v), precision))


def joint_norms(attn: Any) -> Tensor:
    """Returns ``head_norms_S2D`` of diffusers' joint attention: the text's, then the image's."""
    return torch.stack((norms(attn.norm_added_q, attn.norm_added_k), norms(attn.norm_q, attn.norm_k)))


def norms(norm_q: Any, norm_k: Any) -> Tensor:
    return torch.stack((norm_q.weight, norm_k.weight))
