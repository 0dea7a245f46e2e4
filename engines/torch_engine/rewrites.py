"""Rewrites of traced code before it is compiled: what Inductor has no fast code for.

Complex products become real ones. Inductor generates no code for complex tensors: rotary embeddings would make float32
copies of queries and keys, with several extra kernels per block. A linear layer before a tanh-form GELU becomes one
product with the GELU in its epilogue, where Inductor would read and write all features once more.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from engines.fast.gemm import GELU_PRODUCT

PRODUCTS = (operator.mul, torch.mul, "mul")


def real_product(x_D2: Tensor, factor: Tensor) -> Tensor:
    """Return ``view_as_real(view_as_complex(x) * factor)``, shape (..., 2); ``factor`` is complex.

    Both numbers of a pair are read in place, so it compiles to one pass over whole rows. Two joined halves would take
    four passes over every second number.
    """
    cos, sin = (part.unsqueeze(-1) for part in torch.view_as_real(factor).unbind(-1))
    sign_2 = 2 * torch.arange(2, device=x_D2.device) - 1
    return x_D2 * cos + x_D2.flip(-1) * (sin * sign_2)


def make_products_real(graph: Graph) -> int:
    """Rewrite complex products in a Dynamo graph whose result and one factor are viewed as real; return how many."""
    num_products = 0
    for real_view in graph.find_nodes(op="call_function", target=torch.view_as_real):
        factors = _factors(real_view.args[0])
        if factors is None:
            continue
        with graph.inserting_before(real_view):
            real_view.replace_all_uses_with(graph.call_function(real_product, factors))
        _erase_unused(graph, real_view)
        num_products += 1
    return num_products


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase ``node``, which nothing reads, and the products and views that only it read.

    ``Graph.eliminate_dead_code`` takes methods for pure: it would erase ``x.copy_(y)`` too, whose result nothing reads.
    """
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source.users and (source.target in PRODUCTS or source.target is torch.view_as_complex):
            _erase_unused(graph, source)


def _factors(product: Any) -> tuple[Any, Any] | None:
    """Return the real view of one factor, and the other factor; None for any other node."""
    if not isinstance(product, Node) or product.target not in PRODUCTS or len(product.args) != 2:
        return None
    for one, other in (product.args, product.args[::-1]):
        if isinstance(one, Node) and one.target is torch.view_as_complex and _is_complex(other):
            return one.args[0], other
    return None


def _is_complex(value: Any) -> bool:
    return isinstance(value, Node) and getattr(value.meta.get("example_value"), "is_complex", lambda: False)()


def rewrite(graph: Graph) -> int:
    """Apply all rewrites to a Dynamo graph; return how many were made."""
    return make_products_real(graph) + fuse_gelus(graph)


def fuse_gelus(graph: Graph) -> int:
    """Replace each linear layer whose result only a tanh-form GELU reads; return how many.

    That is on CUDA in 16 bits, for layers with a bias.
    """
    num_fused = 0
    for gelu in graph.find_nodes(op="call_function", target=functional.gelu):
        linear = gelu.args[0]
        if gelu.kwargs.get("approximate") != "tanh" or not _is_fusable(linear):
            continue
        with graph.inserting_before(gelu):
            gelu.replace_all_uses_with(graph.call_function(GELU_PRODUCT, linear.args))
        graph.erase_node(gelu)
        graph.erase_node(linear)
        num_fused += 1
    return num_fused


def _is_fusable(linear: Any) -> bool:
    """Return whether ``linear`` is a product of tensors of one dtype and a bias, which one node reads."""
    if not isinstance(linear, Node) or linear.target is not functional.linear or linear.kwargs or len(linear.users) > 1:
        return False
    values = [argument.meta.get("example_value") for argument in linear.args if isinstance(argument, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return len(tensors) == 3 and all(has_gelu_epilogue(x) and x.dtype == tensors[0].dtype for x in tensors)


def has_gelu_epilogue(x: Tensor) -> bool:
    """Return whether products of ``x`` can have a GELU in their epilogue."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
