"""Operators that mark in a traced graph where tokens are cut and joined, and a layout that uses them.

A trace is partitioned at the markers. The parts before the cuts and after the joins are cheap, depend on the rank and
run in torch. The rest becomes the engine, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.layout import Rows, TokenLayout
from engines.parallel.collectives import Axis


@torch.library.custom_op("troupe::cut", mutates_args=())
def cut(x: Tensor, dim: int, length: int, chunk: int, index: int) -> Tensor:
    """Return ``chunk`` rows of dim ``dim`` from ``index * chunk``, zero-padded beyond the dim's ``length``."""
    start = min(index * chunk, length)
    stop = min(start + chunk, length)
    rows = x.narrow(dim, start, stop - start)
    return functional.pad(rows, [0, 0] * (x.ndim - 1 - dim) + [0, chunk - (stop - start)]).clone()


@cut.register_fake
def _(x: Tensor, dim: int, length: int, chunk: int, index: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], chunk, *x.shape[dim + 1 :]))


@torch.library.custom_op("troupe::join", mutates_args=())
def join(gathered: Tensor, dim: int, length: int) -> Tensor:
    """Concatenate chunks, stacked along dim 0, along their dim ``dim``; return the first ``length`` rows."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length).clone()


@join.register_fake
def _(gathered: Tensor, dim: int, length: int) -> Tensor:
    shape = gathered.shape[1:]
    return gathered.new_empty((*shape[:dim], length, *shape[dim + 1 :]))


def cut_features(table: Tensor, dim: int, axis: Axis) -> Tensor:
    """Return this rank's equal share of the features along ``dim``, with a marker in the graph."""
    dim, length = dim % table.ndim, table.shape[dim]
    share: Tensor = CUT(table, dim, length, length // axis.size, axis.index)
    return share


CUT = torch.ops.troupe.cut.default
JOIN = torch.ops.troupe.join.default


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedLayout(TokenLayout):
    """A layout whose cuts and joins leave markers. Symbolic lengths must be multiples of ``num_chunks``."""

    @classmethod
    def tracing(cls, streams: tuple[str, ...], lengths: Mapping[str, int], num_chunks: int) -> MarkedLayout:
        """Return the same as ``TokenLayout.of``, with symbolic lengths."""
        return cls(lengths=tuple((name, lengths[name]) for name in streams), num_chunks=num_chunks)

    def chunk(self, stream: str) -> int:
        length = self.length(stream)
        return -(-length // self.num_chunks) if isinstance(length, int) else length // self.num_chunks

    def valid_rows(self, first: int, num: int) -> Rows | None:
        if all(isinstance(length, int) for _, length in self.lengths):
            return TokenLayout.valid_rows(self, first, num)
        return None

    def cut(self, x: Tensor, *, dim: int, stream: str, index: int) -> Tensor:
        rows: Tensor = CUT(x, dim % x.ndim, self.length(stream), self.chunk(stream), index)
        return rows

    def join(self, gathered: Tensor, *, dim: int, stream: str) -> Tensor:
        whole: Tensor = JOIN(gathered, dim % (gathered.ndim - 1), self.length(stream))
        return whole
