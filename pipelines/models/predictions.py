"""What transformers of diffusers predict: how it is called for, and what stands for it before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


def first_output(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Calls a diffusers transformer; returns the first tensor of its output."""
    prediction: Tensor = module(**call, return_dict=False)[0]
    return prediction


def all_outputs(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Calls a diffusers transformer; returns the tensors of its output one after the other, (B, all values)."""
    import torch

    return torch.cat([output.flatten(1) for output in module(**call, return_dict=False)], dim=1)


def parted(prediction: Tensor, blanks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors that ``all_outputs`` put together, in the shapes of ``blanks``."""
    import torch

    parts = torch.split(prediction, [blank[0].numel() for blank in blanks], dim=1)
    return tuple(part.reshape(blank.shape) for part, blank in zip(parts, blanks, strict=True))


def blank_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Returns zeros that take no memory, in the shape of ``x`` unless another is given."""
    return x.new_zeros(()).expand(x.shape if shape is None else shape)


def of_fewer_channels(config: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[Tensor]:
    """A blank prediction of a model that takes more channels than it predicts: beside latents those of a picture."""
    latents = call["hidden_states"]
    return (blank_like(latents, (latents.shape[0], config["out_channels"], *latents.shape[2:])),)
