"""The eight collectives of TensorRT's ``DistCollective`` node: what the attributes say, and what each one computes.

A collective works on dim 0. ``groups`` is deliberately absent: TensorRT drops it in silence for the symmetric
operations (pytorch/TensorRT #4380, and RTX 1.7.1 as our tests show), so every collective here spans all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Operation = Literal[
    "all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "all_to_all", "gather", "scatter"
]
Reduction = Literal["none", "sum", "prod", "max", "min", "avg"]
Array = npt.NDArray[Any]

OP_TYPE = "DistCollective"
DOMAIN = "troupe"
ROOTED: tuple[Operation, ...] = ("broadcast", "reduce", "gather", "scatter")
REDUCING: tuple[Operation, ...] = ("all_reduce", "reduce", "reduce_scatter")
GROWING: tuple[Operation, ...] = ("all_gather", "gather")
SHRINKING: tuple[Operation, ...] = ("reduce_scatter", "scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over all ``num_ranks`` ranks. ``root`` is -1 for the symmetric operations."""

    operation: Operation
    num_ranks: int
    reduction: Reduction = "none"
    root: int = -1

    def __post_init__(self) -> None:
        if self.operation not in get_args(Operation):
            raise ValueError(f"collective {self.operation!r} is none of {', '.join(get_args(Operation))}")
        if (self.reduction != "none") != (self.operation in REDUCING):
            raise ValueError(f"{self.operation} with reduction {self.reduction!r}: {', '.join(REDUCING)} need one")
        if (self.root >= 0) != (self.operation in ROOTED) or self.root >= self.num_ranks:
            raise ValueError(f"{self.operation} with root {self.root} on {self.num_ranks} ranks")

    def attributes(self) -> dict[str, str | int]:
        """Returns the node's attributes, all of them: TensorRT's parser has no defaults for symmetric operations."""
        return {
            "collective_operation": self.operation,
            "reduce_op": self.reduction,
            "root": self.root,
            "nb_rank": self.num_ranks,
            "group_size": 0,
        }

    def apply(self, inputs: Sequence[Array]) -> list[Array]:
        """Returns each rank's output from each rank's input. What NCCL leaves open on non-roots is NaN (or 0)."""
        if len(inputs) != self.num_ranks:
            raise ValueError(f"{self.operation} over {self.num_ranks} ranks got {len(inputs)} inputs")
        return [np.ascontiguousarray(out) for out in _MEANING[self.operation](self, list(inputs))]


def _unspecified(like: Array) -> Array:
    return np.full_like(like, np.nan if np.issubdtype(like.dtype, np.floating) else 0)


def _on_root(collective: Collective, out: Array) -> list[Array]:
    return [out if rank == collective.root else _unspecified(out) for rank in range(collective.num_ranks)]


def _reduced(collective: Collective, inputs: list[Array]) -> Array:
    stacked = np.stack(inputs)
    reduce: Any = {
        "sum": np.sum, "avg": np.mean, "prod": np.prod, "max": np.max, "min": np.min,
    }[collective.reduction]  # fmt: skip
    reduced: Array = reduce(stacked, axis=0).astype(stacked.dtype)
    return reduced


def _all_to_all(collective: Collective, inputs: list[Array]) -> list[Array]:
    chunks = [np.split(x, collective.num_ranks) for x in inputs]
    return [np.concatenate([sent[rank] for sent in chunks]) for rank in range(collective.num_ranks)]


_MEANING: dict[Operation, Callable[[Collective, list[Array]], list[Array]]] = {
    "all_reduce": lambda c, xs: [_reduced(c, xs)] * c.num_ranks,
    "all_gather": lambda c, xs: [np.concatenate(xs)] * c.num_ranks,
    "broadcast": lambda c, xs: [xs[c.root]] * c.num_ranks,
    "reduce": lambda c, xs: _on_root(c, _reduced(c, xs)),
    "reduce_scatter": lambda c, xs: np.split(_reduced(c, xs), c.num_ranks),
    "all_to_all": _all_to_all,
    "gather": lambda c, xs: _on_root(c, np.concatenate(xs)),
    "scatter": lambda c, xs: np.split(xs[c.root], c.num_ranks),
}
