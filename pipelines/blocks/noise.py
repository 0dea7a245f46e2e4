"""Generators of noise as values: torch's own cannot be told apart from shared ones, nor travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NoiseState:
    """Where a generator on the CPU stands."""

    state: Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> NoiseState:
        return cls(generator.get_state())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseState) and torch.equal(self.state, other.state)

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        # Hazard: torch takes the bytes for a struct where they lie. What was sent may lie at any address, and is copied
        # to one that suits, or the process dies.
        generator.set_state(self.state.clone())
        return generator


def put_away(loop_state: BlockState) -> BlockState:
    """``loop_state`` with what its generators are in place of them."""
    for name, value in vars(loop_state).items():
        if isinstance(value, torch.Generator):
            setattr(loop_state, name, NoiseState.of(value))
    return loop_state


def taken_out(loop_state: BlockState) -> BlockState:
    """``loop_state`` with generators again, of its own."""
    for name, value in vars(loop_state).items():
        if isinstance(value, NoiseState):
            setattr(loop_state, name, value.generator())
    return loop_state
