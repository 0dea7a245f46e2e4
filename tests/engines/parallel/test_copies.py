"""Copies without weights run modules that read values, and take no memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engines.parallel.copies import first_blocks, is_weightless, weightless_copy

NUM_FEATURES = 4096


class Asking(nn.Module):
    """Has an output length that depends on a mask, a table that is no buffer, and a guard against autocast."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.scale = nn.Parameter(torch.ones(NUM_FEATURES))
        self.register_buffer("kept", torch.tensor([True, False, True]))
        self.table = torch.arange(3)

    def forward(self, x_LC: Tensor, mask_L: Tensor) -> Tensor:
        with torch.autocast(device_type=x_LC.device.type, enabled=False):
            repeats = torch.where(mask_L & self.kept, self.table + 1, 0)
        out: Tensor = self.layer(x_LC.repeat_interleave(repeats, dim=0)) * self.scale
        return out


def test_forwards_that_ask_for_values_run_without_weights() -> None:
    with torch.device("meta"):
        module = Asking()
    module.kept, module.table = torch.tensor([True, False, True]), torch.arange(3)
    copied = weightless_copy(module)
    assert copied(torch.zeros(3, NUM_FEATURES), torch.ones(3, dtype=torch.bool)).shape == (1 + 3, NUM_FEATURES)
    assert all(weight.untyped_storage().nbytes() == 4 for weight in copied.parameters())


def test_shapes_and_hooks_are_the_copys_own() -> None:
    module, calls = Asking(), []
    module.layer.register_forward_hook(lambda *_: calls.append(1))
    copied = weightless_copy(module)
    copied(torch.zeros(3, NUM_FEATURES), torch.ones(3, dtype=torch.bool))
    assert not calls
    assert [is_weightless(one) for one in (copied, module)] == [True, False]
    assert [x.shape for x in copied.parameters()] == [x.shape for x in module.parameters()]
    assert copied.kept is not module.kept
    assert module.scale.sum() == NUM_FEATURES


class NeverCopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, object]) -> NeverCopied:
        raise AssertionError("a block that is left out is copied")


def test_first_blocks_share_their_tensors_and_others_are_not_copied() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), NeverCopied(2, 2)])})
    copied = first_blocks(module, ["blocks"], 2)
    assert {name: id(x) for name, x in copied.named_parameters()} == {
        name: id(x) for name, x in module.named_parameters() if ".2." not in name
    }
    assert [len(list(one.get_submodule("blocks").children())) for one in (copied, module)] == [2, 3]
    assert copied.get_submodule("blocks.0") is not module.get_submodule("blocks.0")
