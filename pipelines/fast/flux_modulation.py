"""Shifts, scales and gates of all blocks in one tensor: they depend on the timestep and the pooled prompt alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.model import ModelInputs
from engines.fast.kernels import Modulation

DUAL_VECTORS, SINGLE_VECTORS, LAST_VECTORS = 12, 3, 2
"""Dual: (shift, scale, gate) of attention, then of the MLP, each for text and image. Last norm: scale, shift."""


def modulation_vectors(module: Any, temb_BC: Tensor) -> Tensor:
    """``modulation_VBC``: dual blocks, single blocks, last norm, in running order.

    Any number of rows goes: those of a whole schedule give the vectors of all its steps, with the weights read once.
    """
    active_BC = functional.silu(temb_BC)
    vectors = [_dual(block, active_BC) for block in module.transformer_blocks]
    vectors += [_vectors(block.norm.linear, active_BC) for block in module.single_transformer_blocks]
    vectors.append(_vectors(module.norm_out.linear, active_BC))
    return torch.cat(vectors)


def embedded_times(module: Any, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
    """``temb_SBC``: each timestep with each entry's guidance and pooled prompt, as ``forward`` embeds them."""
    pooled_BC, dtype = inputs["pooled_projections"], inputs["hidden_states"].dtype
    steps, batch = timesteps_SB.shape[0], pooled_BC.shape[0]
    times = [timesteps_SB.to(dtype).expand(steps, batch).flatten() * 1000]
    if "guidance" in inputs:
        times.append(inputs["guidance"].to(dtype).repeat(steps) * 1000)
    temb_XC: Tensor = module.time_text_embed(*times, pooled_BC.repeat(steps, 1))
    return temb_XC.view(steps, batch, -1)


def _dual(block: Any, active_BC: Tensor) -> Tensor:
    text_VBC = _vectors(block.norm1_context.linear, active_BC)
    image_VBC = _vectors(block.norm1.linear, active_BC)
    return torch.stack((text_VBC, image_VBC), dim=1).flatten(0, 1)


def _vectors(linear: Any, active_BC: Tensor) -> Tensor:
    out_BE: Tensor = linear(active_BC)
    batch, channels = active_BC.shape
    return out_BE.view(batch, -1, channels).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class FluxModulation:
    """``modulation_VBC`` by place. ``first_rows`` rows are text; single blocks treat both streams alike."""

    vectors_VBC: Tensor
    num_duals: int
    num_singles: int
    first_rows: int

    def first(self) -> Modulation:
        """Of the norm before the first block."""
        return self._start_of(0)

    def dual_middle(self, index: int) -> tuple[Tensor, Modulation]:
        """Gate of dual block ``index``'s attention, and modulation of the norm before its MLP."""
        kinds = self._dual_kinds(index)
        return kinds[2], self._modulation(kinds[3], kinds[4])

    def dual_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Gate of its MLP, and modulation of the norm before the next block."""
        return self._dual_kinds(index)[5], self._start_of(index + 1)

    def single_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Gate of single block ``index``, and modulation of the norm before what follows."""
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
        vectors_VBC = self.vectors_VBC[index * DUAL_VECTORS : (index + 1) * DUAL_VECTORS]
        return vectors_VBC.view(6, 2, *vectors_VBC.shape[1:])

    def _single_kinds(self, index: int) -> Tensor:
        start = self.num_duals * DUAL_VECTORS + index * SINGLE_VECTORS
        return self.vectors_VBC[start : start + SINGLE_VECTORS].unsqueeze(1)
