"""The fake GPU refuses what a real one does, and records what a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pipelines.support.pretend_gpu import GPU, OtherDeviceError, PretendGpu

NOTED: dict[str, Callable[[Tensor], Any]] = {
    "a tensor of Python values": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "a copy from the host": lambda x: x + torch.ones(3).to(x.device),
    "a number from the host": lambda x: torch.ones((), device="cpu").to(x.device),
    "a copy into the device": lambda x: x.copy_(torch.ones(3)),
    "a copy to the host": lambda x: x.cpu(),
    "a value": lambda x: float(x[0]),
    "a choice": lambda x: 1 if x.sum() > 0 else 2,
    "a list": lambda x: x.tolist(),
    "a tensor of its numbers": lambda x: torch.tensor([x[0], 2 * x[1]]),
    "places": lambda x: x.nonzero(),
    "a mask as an index": lambda x: x[x > 0],
    "an index from the host": lambda x: x[torch.tensor([0, 2])],
    "repeats": lambda x: x.repeat_interleave(torch.arange(3, device=x.device)),
}
FREE: dict[str, Callable[[Tensor], Any]] = {
    "a number of the host": lambda x: x * torch.ones(()) + 2,
    "what is made there": lambda x: x + torch.arange(3, device=x.device).float() + x.new_zeros(3),
    "a mask of one value": lambda x: x.masked_fill(x > 0, 0.0),
    "repeats of known length": lambda x: x.repeat_interleave(torch.arange(3, device=x.device), output_size=3),
    "views": lambda x: x[:, None].expand(3, 2)[1:].flatten(),
    "nothing": lambda x: torch.tensor([], device=x.device),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a tensor of each": lambda x: x + torch.ones(3),
    "a tensor of the host indexed by the device": lambda x: torch.ones(3)[x.long()],
    "values of the device into the host": lambda x: torch.ones(3).index_put_((torch.arange(3),), x),
    "noise of the host": lambda x: torch.randn(3, generator=torch.Generator(), device=x.device),
}


def findings(do: Callable[[Tensor], Any]) -> list[str]:
    with PretendGpu() as gpu:
        x = torch.full((3,), 1.0, device=GPU)
        do(x)
        assert gpu.found == [], "nothing is recorded yet"
        with gpu.recording():
            do(x)
    return gpu.found


@pytest.mark.parametrize("name", NOTED)
def test_what_a_graph_cannot_record_is_noted_with_its_place(name: str) -> None:
    noted = findings(NOTED[name])
    assert noted
    assert all("test_pretend_gpu.py" in one for one in noted)


@pytest.mark.parametrize("name", FREE)
def test_what_it_can_record_is_not(name: str) -> None:
    assert findings(FREE[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_devices_do_not_mix(name: str) -> None:
    with pytest.raises(OtherDeviceError), PretendGpu():
        REFUSED[name](torch.full((3,), 1.0, device=GPU))


def test_values_are_the_true_ones() -> None:
    with PretendGpu():
        x = torch.arange(6.0, device=GPU).view(2, 3)
        x[0] += 10
        assert x.device == GPU
        assert torch.tensor([x[0, 1], x[1, 1]]).tolist() == [11.0, 4.0]
        assert (x @ x.T).tolist() == [[365.0, 134.0], [134.0, 50.0]]
