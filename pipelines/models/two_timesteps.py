"""Embeddings of tokens with two timesteps: 0 for those of given frames and for padding, and that of all others.

They are computed for two rows. For every token, partly in float32, they were 2 % of a step of Wan 2.2 TI2V.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 128
"""Tokens that are embedded one by one: on a GPU a product of so many rows takes no longer than one of two."""


def two_of(times_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest timestep, (B, 2), and the tokens' rows for ``of_tokens``, (B * L,)."""
    times_B2 = torch.stack((times_BL.amin(1), times_BL.amax(1)), dim=1)
    is_other_BL = times_BL != times_B2[:, :1]
    is_third_BL = is_other_BL & (times_BL != times_B2[:, 1:])
    starts_B1 = 3 * torch.arange(len(times_BL), device=times_BL.device)[:, None]
    return times_B2, (starts_B1 + is_other_BL.long() + is_third_BL.long()).flatten()


def of_tokens(x_B2C: Tensor, rows_N: Tensor) -> Tensor:
    """Return ``x_NC``: each token's row. A token with a third timestep gets NaN, which fails its job."""
    return functional.pad(x_B2C, (0, 0, 0, 1), value=math.nan).flatten(0, 1).index_select(0, rows_N)


class TwoTimesteps:
    """Mixin for modulations that diffusers computes of ``timestep`` (B * L,)."""

    def forward(self, timestep: Tensor, *, batch_size: int, **settings: Any) -> tuple[Tensor, ...]:
        """Return what the class returns."""
        make = super().forward  # type: ignore[misc]
        times_BL = timestep.view(batch_size, -1)
        if times_BL.shape[1] <= FEW:
            made: tuple[Tensor, ...] = make(timestep, batch_size=batch_size, **settings)
            return made
        times_B2, rows_N = two_of(times_BL)
        of_two = make(times_B2.flatten(), batch_size=batch_size, **settings)
        return tuple(of_tokens(torch.unflatten(x, 0, (batch_size, 2)), rows_N) for x in of_two)


def replace_class(module: nn.Module, name: str, ours: type[nn.Module]) -> None:
    """Give the submodule ``name`` the class ``ours``, which extends its own. A part of a transformer may have none."""
    submodule = getattr(module, name, None)
    if submodule is not None:
        assert issubclass(ours, type(submodule)), f"{name} is a {type(submodule).__name__}"
        submodule.__class__ = ours
