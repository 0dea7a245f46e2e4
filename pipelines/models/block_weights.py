"""A transformer's layers for hand-ordered steps: stacked GEMMs, and the modulation of all blocks in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Precision
from engines.fast.blocks import DualBlock, Pair
from engines.fast.gemm import ALL, Activation, Gemm, WeightPart, make_gemm, stack_gemm
from engines.fast.kernels import Modulation


def gemm(linear: Any, precision: Precision, activation: Activation = "gelu") -> Gemm:
    return make_gemm([WeightPart(parameter=linear.weight)], linear.bias, precision, activation)


def part_gemm(
    linear: Any,
    precision: Precision,
    activation: Activation = "gelu",
    *,
    rows: slice = ALL,
    columns: slice = ALL,
    bias_N: Tensor | None = None,
) -> Gemm:
    """Return a GEMM for some outputs or inputs of ``linear``, with bias ``bias_N``."""
    return make_gemm([WeightPart(parameter=linear.weight, rows=rows, columns=columns)], bias_N, precision, activation)


def stacked(linears: Sequence[Any], precision: Precision, activation: Activation = "gelu") -> Gemm:
    """Return one GEMM for all ``linears``. Their parameters become views of its own, except quantised weights."""
    return stack_gemm(linears, precision, activation)


def pair(text: Any, image: Any, precision: Precision, activation: Activation = "gelu") -> Pair:
    return Pair(gemm(text, precision, activation), gemm(image, precision, activation))


def joint_projections(attn: Any, precision: Precision) -> Pair:
    """Return the query, key and value projections of diffusers' joint attention."""
    text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    return Pair(stacked(text, precision), stacked((attn.to_q, attn.to_k, attn.to_v), precision))


def joint_norms(attn: Any) -> Tensor:
    """Return ``head_norms_S2D`` of diffusers' joint attention: text, then image."""
    return norms(attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k).view(2, 2, -1)


def dual_block(attn: Any, text: Any, image: Any, precision: Precision) -> DualBlock:
    """Return the block of diffusers' joint attention and the MLPs (``FeedForward``) of both streams."""
    return DualBlock(
        qkv=joint_projections(attn, precision),
        out=pair(attn.to_add_out, attn.to_out[0], precision),
        up=pair(text.net[0].proj, image.net[0].proj, precision),
        down=pair(text.net[2], image.net[2], precision),
        head_norms_S2D=joint_norms(attn),
    )


def norms(*layers: Any) -> Tensor:
    """Return the stacked weights of ``layers``. Their parameters become views of it, which additions change."""
    weight_ND = torch.stack([layer.weight.detach() for layer in layers])
    for layer, own_D in zip(layers, weight_ND, strict=True):
        layer.weight.data = own_D
    return weight_ND


DUAL_VECTORS, SINGLE_VECTORS, LAST_VECTORS = 12, 3, 2
"""Dual: (shift, scale, gate) of attention, then of the MLP, each for text and image. Last norm: scale, shift."""


def vectors_of(linear: Any, active_BC: Tensor) -> Tensor:
    """Return ``vectors_VBC``: the output of ``linear``, cut into vectors of its input's channels."""
    out_BE: Tensor = linear(active_BC)
    batch, channels = active_BC.shape
    return out_BE.view(batch, -1, channels).transpose(0, 1)


def dual_vectors(text: Any, image: Any, active_BC: Tensor) -> Tensor:
    """Return ``vectors_VBC`` of a dual-stream block: (shift, scale, gate) of attention, then of the MLP."""
    return torch.stack((vectors_of(text, active_BC), vectors_of(image, active_BC)), dim=1).flatten(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockVectors:
    """Modulation vectors of all blocks by place. Implements ``BlockModulation``."""

    vectors_VBC: Tensor
    """Vectors of dual blocks, of single blocks, then of the last norm."""
    num_duals: int
    """Number of blocks with a stream for text and one for pictures."""
    num_singles: int
    """Number of blocks with one joined stream."""
    shared: bool
    """True if all dual blocks have the same vectors, and all single blocks too."""
    first_rows: int
    """Number of rows of text."""

    def first(self) -> Modulation:
        return self._start_of(0)

    def dual_middle(self, index: int) -> tuple[Tensor, Modulation]:
        kinds = self._dual_kinds(index)
        return kinds[2], self._modulation(kinds[3], kinds[4])

    def dual_end(self, index: int) -> tuple[Tensor, Modulation]:
        return self._dual_kinds(index)[5], self._start_of(index + 1)

    def single_end(self, index: int) -> tuple[Tensor, Modulation]:
        return self._single_kinds(index)[2], self._start_of(self.num_duals + index + 1)

    def _start_of(self, index: int) -> Modulation:
        if index < self.num_duals:
            kinds = self._dual_kinds(index)
            return self._modulation(kinds[0], kinds[1])
        if index < self.num_duals + self.num_singles:
            kinds = self._single_kinds(index - self.num_duals)
            return self._modulation(kinds[0], kinds[1])
        scale_1BC, shift_1BC = self.vectors_VBC[-LAST_VECTORS:].unsqueeze(1)
        return self._modulation(shift_1BC, scale_1BC)

    def _modulation(self, shift_SBC: Tensor, scale_SBC: Tensor) -> Modulation:
        return Modulation(shift_SBC=shift_SBC, scale_SBC=scale_SBC, first_rows=self.first_rows)

    def _dual_kinds(self, index: int) -> Tensor:
        start = 0 if self.shared else index * DUAL_VECTORS
        vectors_VBC = self.vectors_VBC[start : start + DUAL_VECTORS]
        return vectors_VBC.view(6, 2, *vectors_VBC.shape[1:])

    def _single_kinds(self, index: int) -> Tensor:
        num_before = 1 if self.shared else self.num_duals
        start = num_before * DUAL_VECTORS + (0 if self.shared else index * SINGLE_VECTORS)
        return self.vectors_VBC[start : start + SINGLE_VECTORS].unsqueeze(1)
