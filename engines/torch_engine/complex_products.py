"""Products of complex numbers in traced code, written in real ones, which Inductor can fuse with what is round them.

Inductor makes no code for complex tensors: where rotary embeddings turn queries and keys as complex numbers, it leaves
their float32 copies to be written and read again by kernels of their own, several a block.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

PRODUCTS = (operator.mul, torch.mul, "mul")


def real_product(x_D2: Tensor, factor: Tensor) -> Tensor:
    """``view_as_real(view_as_complex(x) * factor)``, shape (..., 2); ``factor`` is complex.

    Each number is read where it lies and beside its pair's other one, which compiles to one pass of whole rows; two
    halves put together again would be four of every second number.
    """
    cos, sin = (part.unsqueeze(-1) for part in torch.view_as_real(factor).unbind(-1))
    sign_2 = 2 * torch.arange(2, device=x_D2.device) - 1
    return x_D2 * cos + x_D2.flip(-1) * (sin * sign_2)


def make_products_real(graph: Graph) -> int:
    """Rewrites, in a graph of Dynamo's, every product of two complex tensors that is at once seen as real ones, and one
    of whose factors was real before. Returns the number of products."""
    num_products = 0
    for seen in graph.find_nodes(op="call_function", target=torch.view_as_real):
        factors = _factors(seen.args[0])
        if factors is None:
            continue
        with graph.inserting_before(seen):
            seen.replace_all_uses_with(graph.call_function(real_product, factors))
        num_products += 1
    graph.eliminate_dead_code()
    return num_products


def _factors(product: Any) -> tuple[Any, Any] | None:
    """The real view of one factor, and the other."""
    if not isinstance(product, Node) or product.target not in PRODUCTS or len(product.args) != 2:
        return None
    for one, other in (product.args, product.args[::-1]):
        if isinstance(one, Node) and one.target is torch.view_as_complex and _is_complex(other):
            return one.args[0], other
    return None


def _is_complex(value: Any) -> bool:
    return isinstance(value, Node) and getattr(value.meta.get("example_value"), "is_complex", lambda: False)()
