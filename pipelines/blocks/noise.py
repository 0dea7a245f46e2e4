"""Generators of noise as values: torch's own cannot be told apart from shared ones, nor travel beside other tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NoiseState:
    """Where a generator on the CPU stands."""

    state: Tensor

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(self.state.clone())
        return generator


def put_away(loop_state: BlockState) -> BlockState:
    """``loop_state`` with what its generators are in place of them."""
    for name, value in vars(loop_state).items():
        if isinstance(value, torch.Generator):
            setattr(loop_state, name, NoiseState(value.get_state()))
    return loop_state


def taken_out(loop_state: BlockState) -> BlockState:
    """``loop_state`` with generators again, of its own."""
    for name, value in vars(loop_state).items():
        if isinstance(value, NoiseState):
            setattr(loop_state, name, value.generator())
    return loop_state
