"""A generator continues from another's state, also after a transfer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState
from torch import Tensor

from pipelines.blocks.state import NoiseState, attach_generators, detach_generators


def standing_somewhere() -> torch.Generator:
    generator = torch.Generator().manual_seed(5)
    torch.randn(7, generator=generator)
    return generator


def sent(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


def at_an_odd_address(state: NoiseState) -> NoiseState:
    """Return the state at an odd address: Ray's store aligns nothing."""
    num_bytes = state.state.numel()
    room = torch.empty(num_bytes + 1, dtype=torch.uint8)
    moved: Tensor = room[1:] if room.data_ptr() % 2 == 0 else room[:num_bytes]
    return NoiseState(moved.copy_(state.state))


@pytest.mark.parametrize("way", [lambda state: state, sent, at_an_odd_address], ids=["here", "sent", "odd address"])
def test_the_noise_goes_on_where_it_stood(way: Any) -> None:
    generator = standing_somewhere()
    state = way(NoiseState.of(generator))
    assert state == NoiseState.of(generator)
    one, other = state.generator(), state.generator()
    expected = torch.randn(5, generator=generator)
    assert torch.equal(torch.randn(5, generator=one), expected)
    assert torch.equal(torch.randn(5, generator=other), expected), "generators of one state are apart"
    assert state != NoiseState.of(generator)


def test_generators_of_a_loops_values_are_put_away_wherever_they_are() -> None:
    """A solver's arguments are a dict; one generator in two places stays one."""
    generator = standing_somewhere()
    begun = BlockState(generator=generator, extra_step_kwargs={"generator": generator, "eta": 0.0}, plain={"eta": 1.0})
    shared, plain = begun.extra_step_kwargs, begun.plain
    away = sent(detach_generators(begun))
    assert isinstance(away.generator, NoiseState)
    assert away.extra_step_kwargs["generator"] is away.generator
    assert shared["generator"] is generator, "others may hold the dict"
    assert begun.plain is plain
    back = attach_generators(away)
    assert back.extra_step_kwargs == {"generator": back.generator, "eta": 0.0}
    assert torch.equal(torch.randn(5, generator=back.generator), torch.randn(5, generator=generator))
