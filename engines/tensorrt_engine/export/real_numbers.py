"""Rewrite of a traced forward's complex numbers as pairs of real ones, since ONNX and TensorRT have no complex tensors.

Some models apply rotary embeddings as complex numbers. Their tables are computed in torch, before the engine. After
the cut to a rank's tokens, every complex value is a real one with a last dim of 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from engines.tensorrt_engine.export.markers import CUT

aten = torch.ops.aten
SHAPING = (CUT, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int)
"""Supported operators on complex values besides products; their second argument is a dim."""
PRODUCT = aten.mul.Tensor


def write_complex_as_real(graph: fx.Graph) -> None:
    """Rewrite operators on complex values, from their cut or their creation from real values.

    ValueError for operators other than products and ``SHAPING``.
    """
    pairs: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is aten.view_as_complex.default:
                pairs[node] = node.args[0]
            elif node.target is aten.view_as_real.default and node.args[0] in pairs:
                node.replace_all_uses_with(pairs[node.args[0]])
            elif node.target is CUT and _is_complex(node.args[0]):
                pairs[node] = _reshape(graph, node, _real_view(graph, node.args[0]))
            elif any(source in pairs for source in node.all_input_nodes):
                pairs[node] = _rewrite(graph, node, pairs)
    graph.eliminate_dead_code()


def _rewrite(graph: fx.Graph, node: fx.Node, pairs: Mapping[Any, fx.Node]) -> fx.Node:
    if node.target in SHAPING:
        return _reshape(graph, node, pairs[node.args[0]])
    if node.target is PRODUCT and all(map(_is_complex, node.args)):
        left, right = (pairs.get(source) or _real_view(graph, source) for source in node.args)
        return _product(graph, left, right)
    raise ValueError(
        f"{node.target} of complex numbers ({node.name}) cannot be exported, only products and cuts: use engine: torch"
    )


def _real_view(graph: fx.Graph, source: Any) -> fx.Node:
    """Return a complex value's real view, computed in torch before the engine."""
    return _call(graph, aten.view_as_real.default, source)


def _reshape(graph: fx.Graph, node: fx.Node, pair: fx.Node) -> fx.Node:
    """Return ``node`` applied to pairs; negative dims account for the extra last dim."""
    _, dim, *others = node.args
    assert isinstance(dim, int)
    return _call(graph, node.target, pair, dim if dim >= 0 else dim - 1, *others)


def _product(graph: fx.Graph, x_D2: fx.Node, y_D2: fx.Node) -> fx.Node:
    """Return ``(a + bi)(c + di) = (ac - bd) + (ad + bc)i``, stacked along the last dim."""
    (a, b), (c, d) = ([_call(graph, aten.select.int, pair, -1, index) for index in range(2)] for pair in (x_D2, y_D2))
    real = _call(graph, aten.sub.Tensor, _call(graph, PRODUCT, a, c), _call(graph, PRODUCT, b, d))
    imaginary = _call(graph, aten.add.Tensor, _call(graph, PRODUCT, a, d), _call(graph, PRODUCT, b, c))
    return _call(graph, aten.stack.default, [real, imaginary], -1)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Return a call with the ``val`` of a traced node."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]))
    return node


def _is_complex(source: Any) -> bool:
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(value, Tensor) and value.is_complex()
