"""Low-rank products that can be added to a model's weights at run time, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

Mix: TypeAlias = tuple[tuple[str, float], ...]
"""Names of additions, each with its amount."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """``scale * up_NR @ down_RK`` (Hu et al. 2021, arXiv:2106.09685), in the shape of its parameter.

    A parameter that has not two dims counts as a matrix of its first dim and all others: for a bias, K is 1.
    """

    up_NR: Tensor
    down_RK: Tensor
    scale: float = 1.0


LowRanks: TypeAlias = Mapping[str, LowRank]
"""The additions to one module, by parameter name."""

Addition: TypeAlias = Mapping[str, LowRanks]
"""The additions to a model's modules, by module name."""

WriteWeight: TypeAlias = Callable[["Tensor"], object]
"""Takes the new value of a parameter, in its shape, and first rounds it to the parameter's dtype."""

Writers: TypeAlias = Mapping["nn.Parameter", tuple[WriteWeight, ...]]
"""Functions that update copies of a parameter in another form, such as quantised; the parameter stays unchanged."""


def normal_mix(mix: Mix) -> Mix:
    """Return ``mix`` sorted by name and without zero amounts, so that equal mixes compare equal."""
    return tuple(sorted((name, amount) for name, amount in mix if amount))
