"""Per-block compilation: one compiled function serves all blocks of a kind, so a deep model compiles in seconds.

Complex products in traced code are rewritten as real ones. Inductor generates no code for complex tensors. Rotary
embeddings would make float32 copies of queries and keys, with several extra kernels per block.
"""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import (
    compile_backend,
    keep_kernel_choices,
    raise_recompile_limit,
    recompile_limit_error,
)

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


logger = logging.getLogger(__name__)

MAX_VARIANTS = 256
"""Compiled versions of one kind of block, one per team and shape; later ones run uncompiled. PyTorch's limit of 8 is
meant for accidents."""


def compile_blocks(module: nn.Module, plan: ShardPlan, *, backend: str = "inductor") -> None:
    """Compile the ``forward`` of every repeated block, and of all other modules of the same classes, in place.

    The method is compiled instead of the module, so hooks that cut and gather tokens stay outside the traced code. It
    is taken from the class, because a copied module still has the compiled method of its original.
    """
    raise_recompile_limit(MAX_VARIANTS)
    keep_kernel_choices()
    for block in _modules_of_kinds(module, plan):
        forward = types.MethodType(type(block).forward, block)
        compiled = torch.compile(forward, dynamic=False, fullgraph=True, backend=with_real_products(backend))
        block.__dict__["forward"] = _with_eager_fallback(compiled, forward)


def release_blocks(module: nn.Module, plan: ShardPlan) -> None:
    """Undo ``compile_blocks``."""
    for block in _modules_of_kinds(module, plan):
        block.__dict__.pop("forward", None)


def _modules_of_kinds(module: nn.Module, plan: ShardPlan) -> Iterator[nn.Module]:
    kinds = {type(block) for block in plan.blocks_of(module)}
    return (part for part in module.modules() if type(part) in kinds)


@cache
def with_real_products(backend: str) -> Callable[..., Any]:
    """Return the compiler of ``backend``, which rewrites complex products first.

    It is one function for all blocks: another backend object would compile again.
    """
    compile_graph = compile_backend(backend)

    def compile_rewritten(traced: GraphModule, inputs: Any, **options: Any) -> Any:
        if make_products_real(traced.graph):
            traced.recompile()
        return compile_graph(traced, inputs, **options)

    return compile_rewritten


def _with_eager_fallback(compiled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled`` with a fallback: beyond ``MAX_VARIANTS`` new shapes run ``forward``, in the whole process."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except recompile_limit_error():  # raised before any of it has run
            logger.warning("a block has %d compiled versions: from now on, new shapes run uncompiled", MAX_VARIANTS)
            torch.compiler.set_stance("eager_on_recompile")
            return forward(*args, **kwargs)

    return run
