"""Which tensors of a file a translation of its names used: libraries leave out what they do not know, in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

READS = (Tensor.item, Tensor.__float__, Tensor.tolist)
"""How a translation turns a tensor, such as an alpha, into a number."""


class Traced(Tensor):
    """A tensor that knows the keys it was made of. ``numbers`` are the keys whose values were read as numbers."""

    sources: frozenset[str]
    numbers: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [x for x in tree_leaves((args, dict(kwargs or {}))) if isinstance(x, Traced) and hasattr(x, "sources")]
        out = super().__torch_function__(func, tuple(types), args, kwargs or {})  # type: ignore[no-untyped-call]
        if not given:
            return out
        sources = frozenset[str]().union(*(x.sources for x in given))
        if func in READS and given[0].dtype != torch.bool:  # a comparison is a question, not a use
            given[0].numbers.update(sources)
        made = [args[0]] if out is None and isinstance(args[0], Traced) else tree_leaves(out)  # x[...] = y
        for x in made:
            if isinstance(x, Traced):
                x.sources, x.numbers = sources, given[0].numbers
        return out


def traced(tensors: Mapping[str, Tensor], numbers: set[str]) -> dict[str, Tensor]:
    """Return ``tensors`` as ones that know their keys; ``numbers`` fills with those that are read as numbers."""
    marked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = tensor.as_subclass(Traced)
        one.sources, one.numbers = frozenset([name]), numbers
        marked[name] = one
    return marked


def sources_of(tensor: Any) -> frozenset[str]:
    """Return the keys that ``tensor`` was made of."""
    return tensor.sources if isinstance(tensor, Traced) and hasattr(tensor, "sources") else frozenset()


def plain(tensor: Tensor) -> Tensor:
    """Return a traced tensor as a usual one."""
    return tensor.as_subclass(Tensor)
