"""Per-block compilation: one compiled function serves all blocks of a kind, so a deep model compiles in seconds."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import (
    compile_backend,
    compile_error,
    keep_kernel_choices,
    mark_static,
    raise_recompile_limit,
    recompile_limit_error,
)
from engines.torch_engine.rewrites import rewrite

logger = logging.getLogger(__name__)

MAX_VARIANTS = 256
"""Compiled versions of one kind of block, one per team and shape; later ones run uncompiled. PyTorch's limit of 8 is
meant for accidents."""


def compile_blocks(module: nn.Module, plan: ShardPlan, *, dynamic: bool = False, backend: str = "inductor") -> None:
    """Compile the ``forward`` of every repeated block, and of all other modules of the same classes, in place.

    With ``dynamic`` shapes all numbers of tokens share one compiled version (two if a first call has two equal sizes),
    else each has its own. Steps are as fast: on one H200 they differed by at most 1 %.

    The method is compiled instead of the module, so hooks that cut and gather tokens stay outside the traced code. It
    is taken from the class, because a copied module still has the compiled method of its original.
    """
    raise_recompile_limit(MAX_VARIANTS)
    keep_kernel_choices()
    shapes = _Shapes(are_dynamic=dynamic)
    for block in _modules_of_kinds(module, plan):
        block.__dict__["forward"] = _compiled(types.MethodType(type(block).forward, block), shapes, backend)


def release_blocks(module: nn.Module, plan: ShardPlan) -> None:
    """Undo ``compile_blocks``."""
    for block in _modules_of_kinds(module, plan):
        block.__dict__.pop("forward", None)


def _modules_of_kinds(module: nn.Module, plan: ShardPlan) -> Iterator[nn.Module]:
    kinds = {type(block) for block in plan.blocks_of(module)}
    return (part for part in module.modules() if type(part) in kinds)


@cache
def with_rewrites(backend: str) -> Callable[..., Any]:
    """Return the compiler of ``backend`` for traced code after ``rewrite``.

    It is one function for all blocks: another backend object would compile again.
    """
    compile_graph = compile_backend(backend)

    def compile_rewritten(traced: GraphModule, inputs: Any, **options: Any) -> Any:
        if rewrite(traced.graph):
            traced.recompile()
        return compile_graph(traced, inputs, **options)

    return compile_rewritten


@contextmanager
def static_shapes() -> Iterator[None]:
    """Compile for exact shapes in this thread, inside this context: for steps of a size that no job has.

    Inductor's choices for dynamic shapes are those for the first ones.
    """
    token = _IS_STATIC.set(True)
    try:
        yield
    finally:
        _IS_STATIC.reset(token)


_IS_STATIC = ContextVar("is_static", default=False)


@dataclass(slots=True)
class _Shapes:
    """How the blocks of one module are compiled."""

    are_dynamic: bool


def _compiled(forward: Callable[..., Any], shapes: _Shapes, backend: str) -> Callable[..., Any]:
    """Return ``forward`` compiled, with fallbacks.

    Beyond ``MAX_VARIANTS`` new shapes run ``forward``, in the whole process. Where dynamic shapes cannot be compiled,
    each shape is.
    """
    settings: dict[str, Any] = {"fullgraph": True, "backend": with_rewrites(backend)}
    static, dynamic = (torch.compile(forward, dynamic=one, **settings) for one in (False, True))

    def run(*args: Any, **kwargs: Any) -> Any:
        is_dynamic = shapes.are_dynamic and not _IS_STATIC.get()
        try:
            if is_dynamic:
                return dynamic(*_simplified(args), **{name: _simplified(x) for name, x in kwargs.items()})
            return static(*args, **kwargs)
        except recompile_limit_error():  # raised before any of it has run, as the next one
            logger.warning("a block has %d compiled versions: from now on, new shapes run uncompiled", MAX_VARIANTS)
            torch.compiler.set_stance("eager_on_recompile")
            return forward(*args, **kwargs)
        except compile_error() as error:
            if not is_dynamic:
                raise
            logger.warning("blocks are compiled for each shape, since dynamic shapes failed: %s", error)
            shapes.are_dynamic = False
            return static(*args, **kwargs)

    return run


def _simplified(x: Any) -> Any:
    """Return ``x``, and its tuples, with tensors of the same memory that need few symbols.

    They are no views, whose whole tensors would have symbols, too. The last dim of numbers is features, not tokens.
    Blocks of Qwen-Image 2.1 were traced in 13 s with this and in 60 s without, on one busy machine.
    """
    if isinstance(x, tuple):
        parts = map(_simplified, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if not isinstance(x, Tensor):
        return x
    x = x.data
    if x.ndim > 1 and (x.is_floating_point() or x.is_complex()):
        mark_static(x, x.ndim - 1)
    return x
