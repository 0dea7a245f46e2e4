"""Extraction of parts of a traced graph as modules that hold only the tensors they read.

``torch.fx.passes.split_module`` would make weights and varying sizes inputs of each part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn

from engines.core.torch_private import floor_divisions
from engines.tensorrt_engine.export.markers import CUT

Size = fx.Node | int


class Sizes:
    """Nodes of ``graph`` that compute symbolic sizes from dims of ``inputs`` (original node, its placeholder)."""

    def __init__(self, graph: fx.Graph, inputs: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        self._graph = graph
        self._input_dims: dict[sympy.Expr, tuple[fx.Node, int]] = {}
        for original, placeholder in inputs:
            for dim, size in enumerate(original.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    self._input_dims.setdefault(_without_floor(size.node.expr), (placeholder, dim))

    def node(self, size: torch.SymInt) -> Size:
        """Return a node (or number) with the value of ``size``. ValueError if the inputs do not determine it."""
        return self._build(_without_floor(size.node.expr))

    def _build(self, expr: sympy.Expr) -> Size:
        if expr.is_Integer:
            return int(expr)
        for input_expr, (placeholder, dim) in self._input_dims.items():
            ratio = sympy.cancel(expr / input_expr)
            if ratio.is_Rational:
                size = self._graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
                return self._scale(size, int(ratio.p), int(ratio.q))
        if expr.is_Add or expr.is_Mul:
            combine = operator.add if expr.is_Add else operator.mul
            parts = [self._build(argument) for argument in expr.args]
            return reduce(lambda a, b: self._call(combine, a, b), parts)
        raise ValueError(f"the engine cannot compute the size {expr} from its inputs' sizes {list(self._input_dims)}")

    def _scale(self, size: Size, factor: int, divisor: int) -> Size:
        product = size if factor == 1 else self._call(operator.mul, size, factor)
        return product if divisor == 1 else self._call(operator.floordiv, product, divisor)

    def _call(self, function: object, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return int(function(a, b))  # type: ignore[operator]
        return self._graph.call_function(function, (a, b))  # type: ignore[arg-type]


def _without_floor(expr: sympy.Expr) -> sympy.Expr:
    """Replace floor divisions by fractions: the tracer has checked that token shards divide without remainder."""
    for division in floor_divisions():
        expr = expr.replace(division, lambda a, b: a / b)
    return sympy.expand(expr)


RANK = "rank_index"
"""Name of a prologue's extra input: the caller's index among the ranks that share tokens or weights."""


def input_name(placeholder: fx.Node) -> str:
    """Return the model input's name, without ``torch.export``'s prefix for the dict of inputs."""
    return placeholder.name.removeprefix("inputs_")


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def extract(
    traced: fx.GraphModule, inputs: list[fx.Node], part: list[fx.Node], results: list[fx.Node], *, rank: bool = False
) -> fx.GraphModule:
    """Return the nodes ``part`` as a module that takes ``inputs`` (and the rank's index) and returns ``results``."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in inputs:
        copies[node] = graph.placeholder(input_name(node))
        copies[node].meta = dict(node.meta)
    index = graph.placeholder(RANK) if rank else None
    sizes = Sizes(graph, [(node, copies[node]) for node in inputs if not is_size(node)])
    for node in part:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source) if source.op == "get_attr" else sizes.node(source.meta["val"])
        copies[node] = _copy(graph, node, copies)
        if node.target is CUT and index is not None:
            copies[node].args = (*copies[node].args[:4], index)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(tensors_of(traced, graph), graph)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
    """Copy like ``graph.node_copy``, but accept a source that has become a plain number."""
    assert node.op == "call_function", node.op
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: copies[source])
    copied = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    copied.meta = dict(node.meta)
    return copied


def tensors_of(root: nn.Module, graph: fx.Graph) -> dict[str, Tensor]:
    """Return the tensors of ``root`` that ``graph`` reads, by the target of its ``get_attr`` nodes."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    return {name: resolve(root, name) for name in names}


def resolve(root: nn.Module, name: str) -> Tensor:
    tensor = operator.attrgetter(name)(root)
    assert isinstance(tensor, Tensor), name
    return tensor
