"""Hooks that cut and gather tokens at the submodules a shard plan names, without changing the module.

They sit on modules, not inside ``forward``. So a compiled or captured ``forward`` is independent of its rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engines.core.layout import TokenLayout
from engines.core.resources import LRUCache
from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard, named_like
from engines.core.torch_private import version_of
from engines.parallel.collectives import Axis, all_gather

MAX_CUTS = 16
"""Cuts that are held. A tensor that each block has of its own is not used again."""


class TokenHooks:
    """Hooks on one module. They do nothing until ``over`` sets the layout and axis of a forward."""

    def __init__(self, module: nn.Module, plan: ShardPlan) -> None:
        self._layout: TokenLayout | None = None
        self._axis: Axis | None = None
        self._cuts = LRUCache[tuple[Tensor, Tensor]](MAX_CUTS)
        """Recent tensors of this forward and their cuts: the same ones go to each block."""
        self._handles: list[RemovableHandle] = []
        for shard in plan.shards:
            for target in named_like(module, shard.module):
                self._register_shard(target, shard)
        for gather in plan.gathers:
            self._register_gather(module.get_submodule(gather.module), gather)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def over(self, layout: TokenLayout, axis: Axis) -> Iterator[None]:
        """Split forwards in this context over ``axis``."""
        assert layout.num_chunks == axis.size, (layout, axis)
        self._layout, self._axis = layout, axis
        try:
            yield
        finally:
            self._layout = self._axis = None
            self._cuts.clear()

    def _cut(self, x: Any, shard: TokenShard) -> Any:
        """Return this rank's part of ``x``; of a list or tuple, of each item."""
        if isinstance(x, list | tuple):
            return type(x)(self._cut(inner, shard) for inner in x)
        if x is None or self._layout is None or self._axis is None or self._axis.size == 1:
            return x
        if isinstance(x, int):
            assert x == sum(map(self._layout.length, shard.streams)), f"{x} is not the number of {shard.stream} tokens"
            return sum(map(self._layout.chunk, shard.streams))
        if x.ndim <= shard.dim:
            return x
        if x.shape[shard.dim] == 1 != sum(map(self._layout.length, shard.streams)):  # one row for all tokens
            return x
        cut = partial(self._layout.cut_streams, x, dim=shard.dim, streams=shard.streams, index=self._axis.index)
        if torch.compiler.is_compiling():
            return cut()
        _, piece = self._cuts.get((id(x), version_of(x), shard.dim, shard.streams), lambda: (x, cut()))
        return piece

    def _register_shard(self, target: nn.Module, shard: TokenShard) -> None:
        if shard.where == "output":

            def cut_output(_module: nn.Module, _args: Any, output: Any) -> Any:
                if isinstance(output, Tensor):
                    return self._cut(output, shard)
                return type(output)(self._cut(x, shard) if i == shard.key else x for i, x in enumerate(output))

            self._handles.append(target.register_forward_hook(cut_output))
            return
        position = list(inspect.signature(target.forward).parameters).index(str(shard.key))

        def cut_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if shard.key in kwargs:
                return args, {**kwargs, str(shard.key): self._cut(kwargs[str(shard.key)], shard)}
            return tuple(self._cut(x, shard) if i == position else x for i, x in enumerate(args)), kwargs

        self._handles.append(target.register_forward_pre_hook(cut_input, with_kwargs=True))

    def _register_gather(self, target: nn.Module, gather: TokenGather) -> None:
        def join_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            if self._layout is None or self._axis is None or self._axis.size == 1:
                return output
            return self._layout.join(all_gather(output, self._axis), dim=gather.dim, stream=gather.stream)

        self._handles.append(target.register_forward_hook(join_output))
