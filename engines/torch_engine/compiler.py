"""Per-block compilation: one compiled function serves all blocks of a kind, so a deep model compiles in seconds."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import compile_backend, raise_recompile_limit, recompile_limit_error
from engines.torch_engine.complex_products import make_products_real

logger = logging.getLogger(__name__)

MAX_VARIANTS = 256
"""Compiled versions of one kind of block: one per team and shape; later ones run uncompiled. PyTorch's own limit of 8
is meant for accidents.
"""


def compile_blocks(module: nn.Module, plan: ShardPlan, *, backend: str = "inductor") -> None:
    """Compile the ``forward`` of every repeated block, and of all other modules of their kinds, in place.

    The method is compiled and not the module, so hooks (which cut and gather tokens) stay outside the traced code. It
    is taken from the class: a copied module carries its original's compiled method, which is bound to the original.
    """
    raise_recompile_limit(MAX_VARIANTS)
    for block in _of_their_kinds(module, plan):
        forward = types.MethodType(type(block).forward, block)
        compiled = torch.compile(forward, dynamic=False, fullgraph=True, backend=_with_real_products(backend))
        block.__dict__["forward"] = _compiled_while_it_may(compiled, forward)


def release_blocks(module: nn.Module, plan: ShardPlan) -> None:
    """Undo ``compile_blocks``."""
    for block in _of_their_kinds(module, plan):
        block.__dict__.pop("forward", None)


def _of_their_kinds(module: nn.Module, plan: ShardPlan) -> Iterator[nn.Module]:
    kinds = {type(block) for block in plan.blocks_of(module)}
    return (part for part in module.modules() if type(part) in kinds)


@cache
def _with_real_products(backend: str) -> Callable[..., Any]:
    """The same one for all blocks: what is compiled for another backend is compiled again."""
    compile_graph = compile_backend(backend)

    def compile_rewritten(traced: GraphModule, inputs: Any, **options: Any) -> Any:
        if make_products_real(traced.graph):
            traced.recompile()
        return compile_graph(traced, inputs, **options)

    return compile_rewritten


def _compiled_while_it_may(compiled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``; once there are ``MAX_VARIANTS``, whatever has none of them runs ``forward``, in all the process."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except recompile_limit_error():  # before any of it has run
            logger.warning("a block has %d compiled versions: from now on, new shapes run uncompiled", MAX_VARIANTS)
            torch.compiler.set_stance("eager_on_recompile")
            return forward(*args, **kwargs)

    return run
