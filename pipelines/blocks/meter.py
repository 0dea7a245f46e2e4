"""Count a forward's FLOP, memory traffic and peak memory on the meta device, without computing anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from engines.core.torch_private import TorchDispatchMode, tree_leaves

VIEWS = frozenset(
    {"_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "expand", "permute", "reshape"}
    | {"select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
)
"""Operators that read and write nothing."""
MAX_OPERATORS = 8000
"""Limit of operators: a few seconds of one core."""


class OperatorLimitError(RuntimeError):
    """A forward has more than ``MAX_OPERATORS`` operators."""


class ForwardMeter:
    """A context that counts forwards on "meta". Raise ``OperatorLimitError`` above ``MAX_OPERATORS``.

    ``flops`` of products, convolutions and attention, ``moved_bytes`` that operators read and write, and ``peak_bytes``
    of results alive at once. Attention counts as one fused kernel.
    """

    def __init__(self) -> None:
        self._attention, self._storages = _FusedAttention(), _Storages()
        self._products, self._stack = FlopCounterMode(display=False), ExitStack()

    def __enter__(self) -> ForwardMeter:
        for mode in (self._attention, self._products, self._storages):
            self._stack.enter_context(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def flops(self) -> int:
        return int(self._products.get_total_flops()) + self._attention.flops

    @property
    def moved_bytes(self) -> int:
        return self._storages.moved_bytes

    @property
    def peak_bytes(self) -> int:
        return self._storages.peak_bytes


class _FusedAttention(TorchFunctionMode):
    """Fused attention: on "meta" it would otherwise allocate the products of all queries with all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
        query, key, value = named["query"], named["key"], named["value"]
        rows = query.numel() // query.shape[-1]
        self.flops += 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Storages(TorchDispatchMode):
    """Live storages, by the lifetimes of Python's references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = self.peak_bytes = self._held_bytes = 0
        self._known: set[int] = set()
        self._num_operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise OperatorLimitError
        out = func(*args, **(kwargs or {}))
        results, given = _tensors(out), _tensors((args, dict(kwargs or {})))
        if func.overloadpacket.__name__ not in VIEWS:
            self.moved_bytes += sum(x.nbytes for x in (*results, *given))
        old = {x.untyped_storage()._cdata for x in given}
        for x in results:
            if x.untyped_storage()._cdata not in old:  # a view, or what was written to in place
                self._hold(x.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._held_bytes -= size


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
