"""A call split into names and values is the same call when joined, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.core.model import Branch
from pipelines.blocks.arguments import nested, split

X, Y = torch.zeros(2), torch.ones(3)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"x": X, "size": (4, 6), "scale": 0.5},
    "lists": {"x": [X, Y], "shapes": [(1, 2)]},
    "values beside tensors": {"x": [5, X, "a", Y]},
    "dicts": {"x": {"first": X, "rest": [Y, {"last": 1, "y": Y}]}},
    "more than ten": {"x": [torch.tensor(number) for number in range(12)]},
}


def plain(value: Any) -> Any:
    """Return the value with tensors as their numbers, which can be compared."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_it_comes_back(name: str, is_sorted: bool) -> None:
    tensors, constants = split(CALLS[name])
    arguments = Branch(inputs=tensors, constants=constants).arguments
    arguments = dict(sorted(arguments.items())) if is_sorted else arguments
    assert plain(nested(arguments)) == plain(CALLS[name])


def test_none_says_nothing() -> None:
    assert split({"x": None, "y": X}) == ({"y": X}, {})
