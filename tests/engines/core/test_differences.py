"""The relative difference is a number that can be compared, whatever the answers are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from engines.core.tensors import is_exporting, relative_difference


def test_it_is_relative_to_what_is_expected() -> None:
    assert relative_difference(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


@pytest.mark.parametrize("given", [[1.0, math.nan], [1.0, math.inf], [1.0]])
def test_what_cannot_be_compared_is_as_far_away_as_can_be(given: list[float]) -> None:
    assert max(0.5, relative_difference(torch.tensor(given), torch.ones(2))) == math.inf


def test_zeros_equal_zeros() -> None:
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(torch.ones(2), torch.zeros(2)) == math.inf


class Either(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_exporting() else x - 1


def test_exported_code_knows_that_it_is() -> None:
    x, module = torch.zeros(1), Either()
    assert module(x) == torch.compile(module, backend="eager", fullgraph=True)(x) == -1
    assert torch.export.export(module, (x,), strict=False).module()(x) == 1
