"""Shard plans: where a model is split, as plain data beside its (single-device) module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """One tensor to cut along its token dim: rank r of n holds chunk r, padded to equal chunks.

    A tensor without the dim, or with one row for all tokens, stays whole. A whole number that counts a stream's tokens
    becomes the rank's number of tokens, padding included.
    """

    module: str
    """The submodule's name ("" is the model itself, ``*`` stands for a number)."""
    where: Literal["input", "output"]
    """True if ``key`` names an argument of the module or a part of its output."""
    key: str | int
    """The tensor's parameter name, or its position in an output tuple (0 for a single output)."""
    dim: int
    """The tensor's token dim."""
    stream: str | tuple[str, ...]
    """Its token sequence (FLUX: "text", "image"), or several that it concatenates in attention's order."""

    @property
    def streams(self) -> tuple[str, ...]:
        return (self.stream,) if isinstance(self.stream, str) else self.stream


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGather:
    """A module's output to gather from all ranks."""

    module: str
    """The submodule's name, as in ``TokenShard``."""
    dim: int
    """The output's token dim."""
    stream: str
    """Its token sequence, whose padding is cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """A rule for layers by name."""

    pattern: str
    """Name of a layer, where ``*`` stands for a block's number."""

    def matches(self, name: str) -> bool:
        return _regex(self.pattern).fullmatch(name) is not None


def named_like(module: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the submodules whose names match ``pattern``, where ``*`` stands for a number. KeyError if none does."""
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
    """Linears whose output features are split over the tensor axis."""

    segments: tuple[int, ...] = (1,)
    """Shares of output features that are split separately (gate and gated value: ``(1, 1)``); ``(1,)`` if plain."""
    unit: int = 1
    """Neighbouring features that stay on one rank (one key head, if these are fewer than query heads)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLinear(LayerRule):
    """Linears whose input features are split over the tensor axis; partial results are summed over the ranks.

    FLUX single blocks concatenate attention and MLP: ``(1, 4)``.
    """

    segments: tuple[int, ...] = (1,)
    """Shares of input features that were split separately, then concatenated; ``(1,)`` for a plain layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullWidthNorm(LayerRule):
    """RMS norms over all heads together: the weight is split, and the tensor axis adds up the sums of squares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTable(LayerRule):
    """Modules without weights whose outputs have the features of all heads together (rotary tables)."""

    dim: int
    """The dim of each output to split over the tensor axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """How one transformer class is split."""

    streams: tuple[str, ...]
    """Token sequences in the order in which attention concatenates them."""
    blocks: tuple[str, ...]
    """Names of the ``ModuleList`` of repeated blocks, in running order."""
    shards: tuple[TokenShard, ...]
    """Tensors that ranks cut by tokens."""
    gathers: tuple[TokenGather, ...]
    """Outputs whose tokens are gathered again: at least the prediction."""
    linears: tuple[ColumnLinear | RowLinear | FullWidthNorm, ...]
    """Layers that a tensor axis splits by features."""
    carried: tuple[str, ...] = ()
    """Parameters that every block returns updated, in output order; without them there is no pipeline."""
    tables: tuple[FeatureTable, ...] = ()
    """Tables with one entry a feature, which are cut as the layers that read them."""
    alone: tuple[tuple[str, str], ...] = ()
    """Modules in which a stream attends to itself only, with the stream."""
    whole_queries: tuple[str, ...] = ()
    """Names of attentions to tokens that ranks share out, whose queries every rank holds whole; ``*`` as above."""
    free: tuple[str, ...] = ()
    """Arguments that do not change the prediction's shape: branches that differ in them may run in parallel."""
    reads_lse: bool = False
    """True if attention reads its kernel's log-sum-exp, to merge the result with that over other keys."""

    def rule_of(self, name: str) -> ColumnLinear | RowLinear | FullWidthNorm | None:
        """Return the first rule that matches the layer's name."""
        return next((rule for rule in self.linears if rule.matches(name)), None)

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """Return all repeated blocks of ``module``, in running order."""
        return [block for name in self.blocks for block in module.get_submodule(name).children()]
