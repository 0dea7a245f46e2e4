"""What is split, and where: plain data that a model family keeps beside its (single-device) module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """One tensor to cut along its token dim, so that rank r of n keeps chunk r (padded to equal chunks).

    ``module`` is the name of the submodule ("" is the model itself); ``where`` says whether the tensor enters it or
    leaves it; ``key`` is its parameter name, or its position in an output tuple (0 for a single output). ``stream``
    names the token sequence it belongs to (for FLUX "text" and "image"), whose true length decides the padding.
    """

    module: str
    where: Literal["input", "output"]
    key: str | int
    dim: int
    stream: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGather:
    """The output of ``module`` to gather from all ranks along ``dim``; padding of ``stream`` is cut off."""

    module: str
    dim: int
    stream: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnLinear:
    """Linears (names with ``*`` for a block number) whose output features are split over the tensor axis."""

    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLinear:
    """Linears whose input features are split over the tensor axis; partial results are summed over the ranks.

    ``segments`` are the shares of the input features that were split one by one before they were concatenated
    (FLUX single blocks: attention then MLP, ``(1, 4)``); ``(1,)`` for a plain row-split layer.
    """

    pattern: str
    segments: tuple[int, ...] = (1,)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullWidthNorm:
    """RMS norms over all heads together: the sum of squares is summed over the tensor axis, the weight is split."""

    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """How one transformer class is split.

    ``streams`` is the order in which token sequences are concatenated inside attention. ``blocks`` are the names of the
    ``ModuleList`` of repeated blocks, in running order. ``carried`` are the parameters of a block that it returns
    updated, in the order of its output (of all blocks alike); a plan without them allows no pipeline.
    """

    streams: tuple[str, ...]
    blocks: tuple[str, ...]
    shards: tuple[TokenShard, ...]
    gathers: tuple[TokenGather, ...]
    linears: tuple[ColumnLinear | RowLinear | FullWidthNorm, ...]
    carried: tuple[str, ...] = ()
