"""Generators of noise as values: torch's own generators have no equality, and cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NoiseState:
    """The state of a generator on the CPU."""

    state: Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> NoiseState:
        return cls(generator.get_state())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseState) and torch.equal(self.state, other.state)

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        # Hazard: torch reads the bytes in place as a struct. Received bytes may be unaligned, and are copied, or the
        # process dies.
        generator.set_state(self.state.clone())
        return generator


def put_away(loop_state: BlockState) -> BlockState:
    """Replace the generators in ``loop_state``, also those in dicts (a solver's arguments), by their states.

    One generator in several places becomes one value.
    """
    known: dict[int, NoiseState] = {}
    return _with_each(torch.Generator, lambda one: known.setdefault(id(one), NoiseState.of(one)), loop_state)


def taken_out(loop_state: BlockState) -> BlockState:
    """Replace the states in ``loop_state`` by new generators."""
    known: dict[int, torch.Generator] = {}
    return _with_each(NoiseState, lambda one: known.setdefault(id(one), one.generator()), loop_state)


def _with_each(kind: type, change: Callable[[Any], Any], loop_state: BlockState) -> BlockState:
    """Change values of ``kind``, also those in dicts, which are copied: they may be shared."""
    for name, value in vars(loop_state).items():
        if isinstance(value, kind):
            setattr(loop_state, name, change(value))
        elif isinstance(value, dict) and any(isinstance(inner, kind) for inner in value.values()):
            changed = {key: change(inner) if isinstance(inner, kind) else inner for key, inner in value.items()}
            setattr(loop_state, name, changed)
    return loop_state
