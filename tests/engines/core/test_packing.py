"""Values that cannot be packed are refused before they are sent, with their place."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.core.packing import pack
from engines.core.parcel import Parcel


@dataclass(frozen=True, slots=True)
class Kept:
    x_BC: torch.Tensor
    noise: Any


class Hidden:
    """Pickles as a value that it does not hold as an attribute."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return UserList, ([torch.Generator()],)


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda one: one, "state"),
        (lambda one: {"steps": [torch.ones(3), {7: one}]}, r"state\['steps'\]\[1\]\[7\]"),
        (lambda one: Kept(x_BC=torch.ones(2, 3), noise=(None, one)), r"state\.noise\[1\]"),
        (lambda one: SimpleNamespace(values={"a": 1}, inner=SimpleNamespace(rng=one)), r"state\.inner\.rng"),
        (lambda one: Hidden(), "a pickled part of a Hidden"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_generator_is_refused_where_it_lies(wrap: Callable[[Any], Any], place: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"^{place} is a torch.Generator, which cannot be packed"):
        pack(wrap(torch.Generator()), torch.device(device))


def test_its_state_can_be_packed() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.randn(4, generator=generator)
    _, state = Parcel.of((torch.ones(3), torch.Generator().manual_seed(3).get_state())).open()
    again = torch.Generator()
    again.set_state(state.clone())
    assert torch.randn(4, generator=again).equal(expected)


def test_a_state_that_holds_itself_is_searched_once() -> None:
    state: dict[str, Any] = {"other": 1}
    state["self"] = state
    state["rng"] = torch.Generator()
    with pytest.raises(ValueError, match=r"^state\['rng'\] is a torch\.Generator"):
        pack(state, torch.device("cpu"))
