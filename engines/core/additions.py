"""What may be added to the weights of a model while it runs: low-rank products, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

Mix: TypeAlias = tuple[tuple[str, float], ...]
"""Names of additions, each with how much of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """``scale * up_NR @ down_RK`` (Hu et al. 2021, arXiv:2106.09685), in the shape of the parameter that gets it.

    A parameter of other than two dims counts as a matrix of its first dim and all others: of a bias, K is 1.
    """

    up_NR: Tensor
    down_RK: Tensor
    scale: float = 1.0


LowRanks: TypeAlias = Mapping[str, LowRank]
"""What is added to one module, by the names of its parameters."""

Addition: TypeAlias = Mapping[str, LowRanks]
"""What is added to the modules of a model, by their names."""

WriteWeight: TypeAlias = Callable[["Tensor"], object]
"""Takes the new value of a parameter, in its shape, and rounds it to the parameter's dtype before anything else."""

Writers: TypeAlias = Mapping["nn.Parameter", tuple[WriteWeight, ...]]
"""Who holds what of parameters in another form, such as quantised; the parameters themselves stay as they are."""


def normal_mix(mix: Mix) -> Mix:
    """Returns ``mix`` in the order of names, without what nothing is wanted of: equal ones compare equal."""
    return tuple(sorted((name, amount) for name, amount in mix if amount))
