"""Measures the peak memory of tensors on any device, including "meta"."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make inside the block; ``peak`` is the maximum of live bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage(), inputs)
        return result

    def _note(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        if storage._cdata in inputs | self._known:
            return
        self._known.add(storage._cdata)
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, name: int, num_bytes: int) -> None:
        self._known.discard(name)
        self._live -= num_bytes
