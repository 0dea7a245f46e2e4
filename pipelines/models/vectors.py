"""Shifts, scales and gates of all blocks in one tensor: they depend on the timestep, and not on the latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.fast.kernels import Modulation

DUAL_VECTORS, SINGLE_VECTORS, LAST_VECTORS = 12, 3, 2
"""Dual: (shift, scale, gate) of attention, then of the MLP, each for text and image. Last norm: scale, shift."""


def vectors_of(linear: Any, active_BC: Tensor) -> Tensor:
    """Returns ``vectors_VBC``: the layer's output features, cut into vectors of as many channels as it reads."""
    out_BE: Tensor = linear(active_BC)
    batch, channels = active_BC.shape
    return out_BE.view(batch, -1, channels).transpose(0, 1)


def dual_vectors(text: Any, image: Any, active_BC: Tensor) -> Tensor:
    """Returns those of a dual-stream block, whose two layers give (shift, scale, gate) of attention and of the MLP."""
    return torch.stack((vectors_of(text, active_BC), vectors_of(image, active_BC)), dim=1).flatten(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockVectors:
    """``vectors_VBC`` by place: of dual blocks, of single blocks, of the last norm. Implements ``BlockModulation``.

    If they are ``shared``, all dual blocks have the same ones, and so have all single blocks. ``first_rows`` rows are
    text.
    """

    vectors_VBC: Tensor
    num_duals: int
    num_singles: int
    shared: bool
    first_rows: int

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
