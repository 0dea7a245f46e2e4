"""What a meter counts of forwards whose arithmetic and tensors are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipelines.parts import meter
from pipelines.parts.meter import ForwardMeter, OperatorLimitError


@torch.no_grad()
def test_products_traffic_and_what_is_alive() -> None:
    """Two layers on 8 rows: the first's result is dropped when the second's is there."""
    wide = nn.Linear(16, 64, bias=False, device="meta")
    narrow = nn.Linear(64, 4, bias=False, device="meta")
    x = torch.empty(8, 16, device="meta")
    with ForwardMeter() as counted:
        hidden = wide(x)
        out = narrow(hidden)
        del hidden
        again = narrow(wide(x))
    assert counted.flops == 2 * 2 * 8 * (16 * 64 + 64 * 4)
    assert counted.moved_bytes == 2 * 4 * (8 * 16 + 64 * 16 + 2 * 8 * 64 + 64 * 4 + 8 * 4)
    assert counted.peak_bytes == 4 * (8 * 64 + 8 * 4 + 8 * 4)
    assert out.shape == again.shape


def test_attention_is_one_kernel() -> None:
    """No score of all queries with all keys is held."""
    q = torch.empty(1, 2, 4096, 8, device="meta")
    with ForwardMeter() as counted:
        out = functional.scaled_dot_product_attention(q, q, q)
    assert out.shape == q.shape
    assert counted.flops == 4 * 2 * 4096**2 * 8
    assert counted.peak_bytes == out.nbytes


def test_too_much_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MAX_OPERATORS", 3)
    x = torch.ones(2, device="meta")
    with ForwardMeter(), pytest.raises(OperatorLimitError):
        x.relu().relu().relu().relu()
