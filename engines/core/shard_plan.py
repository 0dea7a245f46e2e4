"""What is split, and where: plain data that a model family keeps beside its (single-device) module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """One tensor to cut along its token dim, so that rank r of n keeps chunk r (padded to equal chunks).

    ``module`` is the name of the submodule ("" is the model itself, ``*`` stands for a number); ``where`` says whether
    the tensor enters it or leaves it; ``key`` is its parameter name, or its position in an output tuple (0 for a single
    output). ``stream`` names the token sequence it belongs to (for FLUX "text" and "image"), whose true length decides
    the padding. A tensor that comes without the dim, or with one row for all tokens, stays whole.

    A tensor of several streams, one after another, names them all; each is cut, as attention has them. Of a whole
    number, that of the stream's tokens, each rank is told how many it holds, padding included.
    """

    module: str
    where: Literal["input", "output"]
    key: str | int
    dim: int
    stream: str | tuple[str, ...]

    @property
    def streams(self) -> tuple[str, ...]:
        return (self.stream,) if isinstance(self.stream, str) else self.stream


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGather:
    """The output of ``module`` to gather from all ranks along ``dim``; padding of ``stream`` is cut off."""

    module: str
    dim: int
    stream: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """What happens to the layers whose names fit ``pattern``, ``*`` standing for a block's number."""

    pattern: str

    def matches(self, name: str) -> bool:
        return _regex(self.pattern).fullmatch(name) is not None


def named_like(module: nn.Module, pattern: str) -> list[nn.Module]:
    """The submodules whose names fit ``pattern``, where ``*`` stands for a number. KeyError if there is none."""
    if "*" not in pattern:
        return [module.get_submodule(pattern)]
    named = [inner for name, inner in module.named_modules() if _regex(pattern).fullmatch(name)]
    if not named:
        raise KeyError(f"no submodule is named like {pattern}")
    return named


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\d+".join(re.escape(part) for part in pattern.split("*")))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnLinear(LayerRule):
    """Linears whose output features are split over the tensor axis.

    ``segments`` are the shares of the output features that are split one by one, since they are used apart (a gate and
    what it gates: ``(1, 1)``); ``(1,)`` for a plain layer. ``unit`` features in a row stay on one rank (a head of keys
    where heads are fewer than those of the queries).
    """

    segments: tuple[int, ...] = (1,)
    unit: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLinear(LayerRule):
    """Linears whose input features are split over the tensor axis; partial results are summed over the ranks.

    ``segments`` are the shares of the input features that were split one by one before they were concatenated
    (FLUX single blocks: attention then MLP, ``(1, 4)``); ``(1,)`` for a plain row-split layer.
    """

    segments: tuple[int, ...] = (1,)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullWidthNorm(LayerRule):
    """RMS norms over all heads together: the sum of squares is summed over the tensor axis, the weight is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTable(LayerRule):
    """Modules without weights that give tensors of the features of all heads together (what positions turn them by):
    each is split along ``dim`` over the tensor axis.
    """

    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """How one transformer class is split.

    ``streams`` is the order in which token sequences are concatenated inside attention. ``blocks`` are the names of the
    ``ModuleList`` of repeated blocks, in running order. ``carried`` are the parameters of a block that it returns
    updated, in the order of its output (of all blocks alike); a plan without them allows no pipeline. ``alone`` names
    modules in which a stream attends to itself, and no other is there. ``free`` are arguments, inputs or
    constants, on which the shape of the prediction does not depend: branches that differ in them may run at the same
    time.
    """

    streams: tuple[str, ...]
    blocks: tuple[str, ...]
    shards: tuple[TokenShard, ...]
    gathers: tuple[TokenGather, ...]
    linears: tuple[ColumnLinear | RowLinear | FullWidthNorm, ...]
    carried: tuple[str, ...] = ()
    tables: tuple[FeatureTable, ...] = ()
    alone: tuple[tuple[str, str], ...] = ()
    free: tuple[str, ...] = ()

    def rule_of(self, name: str) -> ColumnLinear | RowLinear | FullWidthNorm | None:
        """The first rule that the layer of that name fits."""
        return next((rule for rule in self.linears if rule.matches(name)), None)

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """All repeated blocks of ``module``, in running order."""
        return [block for name in self.blocks for block in module.get_submodule(name).children()]
