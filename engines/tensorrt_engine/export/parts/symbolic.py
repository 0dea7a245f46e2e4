"""Sizes inside a core graph, computed from the sizes of its own inputs instead of the whole model's."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from engines.core.torch_private import floor_divisions

Size = fx.Node | int


class Sizes:
    """Rebuilds symbolic sizes in ``graph`` from the dims of ``inputs`` (original node -> its placeholder)."""

    def __init__(self, graph: fx.Graph, inputs: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        self._graph = graph
        self._known: dict[sympy.Expr, tuple[fx.Node, int]] = {}
        for original, placeholder in inputs:
            for dim, size in enumerate(original.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    self._known.setdefault(_exact(size.node.expr), (placeholder, dim))

    def node(self, size: torch.SymInt) -> Size:
        """Returns a node (or number) with the value of ``size``. ValueError when the inputs do not determine it."""
        return self._build(_exact(size.node.expr))

    def _build(self, expr: sympy.Expr) -> Size:
        if expr.is_Integer:
            return int(expr)
        for known, (placeholder, dim) in self._known.items():
            ratio = sympy.cancel(expr / known)
            if ratio.is_Rational:
                size = self._graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
                return self._scale(size, int(ratio.p), int(ratio.q))
        if expr.is_Add or expr.is_Mul:
            combine = operator.add if expr.is_Add else operator.mul
            parts = [self._build(argument) for argument in expr.args]
            return reduce(lambda a, b: self._call(combine, a, b), parts)
        raise ValueError(f"the engine cannot compute the size {expr} from its inputs' sizes {list(self._known)}")

    def _scale(self, size: Size, times: int, divided_by: int) -> Size:
        grown = size if times == 1 else self._call(operator.mul, size, times)
        return grown if divided_by == 1 else self._call(operator.floordiv, grown, divided_by)

    def _call(self, function: object, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return int(function(a, b))  # type: ignore[operator]
        return self._graph.call_function(function, (a, b))  # type: ignore[arg-type]


def _exact(expr: sympy.Expr) -> sympy.Expr:
    """Writes floor divisions as fractions: shards of tokens divide without rest, which the tracer has checked."""
    for division in floor_divisions():
        expr = expr.replace(division, lambda a, b: a / b)
    return sympy.expand(expr)
