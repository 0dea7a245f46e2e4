"""Device memory that holds weights, as bytes: its place, its release and its return."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

INSTALL = "pip install '.[sleep]'"
ACTIVE = "active"
"""Prefix of the allocator's states of blocks in use."""


class WeightSpans(Protocol):
    """The memory of weights on one device."""

    def region(self) -> Any:
        """Return a context. Weights are allocated inside it, on the caller's thread."""
        ...

    def hold(self, module: nn.Module) -> None:
        """Add the parameters and buffers of ``module``, which has its final weights."""
        ...

    def find(self) -> list[Tensor]:
        """Return all memory in use, as uint8 tensors of one dim. They stay valid after ``restore``."""
        ...

    def gone(self, spans: Sequence[Tensor]) -> set[int]:
        """Return the numbers of the spans whose memory was given back since ``find``, as nothing used it any more."""
        ...

    def release(self, spans: Sequence[Tensor]) -> None:
        """Give the memory back to the device. Values are lost, tensors stay."""
        ...

    def restore(self, spans: Sequence[Tensor]) -> None:
        """Allocate the memory of all tensors again, with undefined values: on a GPU at the same addresses."""
        ...


class CpuSpans:
    """Storages of the held modules' tensors. They keep their identity, so all views come back with them."""

    def __init__(self) -> None:
        self._modules: list[ref[nn.Module]] = []
        """Modules of engines that are closed may be gone."""

    @contextmanager
    def region(self) -> Iterator[None]:
        yield

    def hold(self, module: nn.Module) -> None:
        self._modules.append(ref(module))
        _make_resizable(module)

    def find(self) -> list[Tensor]:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in self._tensors() if x.numel()}
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]

    def gone(self, spans: Sequence[Tensor]) -> set[int]:
        return set()  # the spans hold their storages

    def release(self, spans: Sequence[Tensor]) -> None:
        self._sizes = [span_B.untyped_storage().nbytes() for span_B in spans]
        for span_B in spans:
            span_B.untyped_storage().resize_(0)

    def restore(self, spans: Sequence[Tensor]) -> None:
        for span_B, size in zip(spans, self._sizes, strict=True):
            span_B.untyped_storage().resize_(size)

    def _tensors(self) -> Iterator[Tensor]:
        for one in self._modules:
            if (module := one()) is not None:
                yield from _tensors_of(module)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [x.detach() for x in (*module.parameters(), *module.buffers()) if x.device.type == "cpu"]


def _make_resizable(module: nn.Module) -> None:
    """Replace storages of mapped files by ones of the allocator; tensors that shared one share the new one."""
    replaced: dict[int, torch.UntypedStorage] = {}
    for x in (*module.parameters(), *module.buffers()):
        storage = x.untyped_storage()
        if x.device.type == "cpu" and x.numel() and not storage.resizable():
            new = replaced.setdefault(storage.data_ptr(), storage.clone())  # type: ignore[no-untyped-call]
            x.data = torch.empty(0, dtype=x.dtype).set_(new, x.storage_offset(), x.shape, x.stride())


class CudaSpans:
    """Blocks of memory pools whose pages torch-memory-saver unmaps and maps again, without its own host copy.

    A pool lives as long as its region: afterwards, the allocator returns what temporary tensors left. Other pools,
    among them those of captured graphs, are not touched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: set[tuple[int, int]] = set()
        self._depth = 0
        _ = self._library  # a missing package is an error before weights are loaded

    @contextmanager
    def region(self) -> Iterator[None]:
        if self._depth:
            yield
            return
        with torch.cuda.device(self._device):
            pool: Any = torch.cuda.MemPool(self._allocator)
            self._pools.add(tuple(pool.id))
            self._depth += 1
            try:
                with torch.cuda.use_mem_pool(pool):
                    yield
            finally:
                self._depth -= 1
                del pool
                torch.cuda.empty_cache()

    def hold(self, module: nn.Module) -> None:
        """Do nothing: the pools know all blocks."""

    def find(self) -> list[Tensor]:
        torch.cuda.synchronize(self._device)
        return [_view(run, self._device) for one in self._segments() for run in _runs_in_use(one["blocks"])]

    def gone(self, spans: Sequence[Tensor]) -> set[int]:
        ends = {one["address"]: one["address"] + one["total_size"] for one in self._segments()}
        begins = sorted(ends)

        def is_there(address: int) -> bool:
            number = bisect_right(begins, address)
            return number > 0 and address < ends[begins[number - 1]]

        return {number for number, span_B in enumerate(spans) if not is_there(span_B.data_ptr())}

    def _segments(self) -> list[Any]:
        """Return the segments of the pools. A block is in one of them."""
        segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) in self._pools]  # type: ignore[no-untyped-call]
        return [one for one in segments if one["device"] == self._device.index]

    def release(self, spans: Sequence[Tensor]) -> None:
        with torch.cuda.device(self._device):  # on threads that never used the device, too
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # of activations too: the next model needs the room
            self._library.tms_pause(None)

    def restore(self, spans: Sequence[Tensor]) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
            self._library.tms_resume(None)

    @cached_property
    def _hook(self) -> Any:
        # In this mode the library sees the allocations of its pools only: each of them, on any thread, is to be
        # releasable. The library ends the process at a call from a thread where that is off.
        os.environ["TMS_INIT_ENABLE"] = "1"
        try:
            from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch
        except ImportError as error:
            raise ValueError(f"models that share GPUs need the package torch-memory-saver: {INSTALL}") from error
        return HookUtilModeTorch()

    @cached_property
    def _allocator(self) -> Any:
        return self._hook.get_allocator()

    @cached_property
    def _library(self) -> Any:
        from torch_memory_saver.binary_wrapper import BinaryWrapper

        return BinaryWrapper(self._hook.get_path_binary()).cdll


Run = tuple[int, int]
"""Address and size of adjacent blocks."""


def _runs_in_use(blocks: Sequence[Any]) -> Iterator[Run]:
    """Yield runs of adjacent blocks in use. ``blocks`` are all blocks of a segment, in order."""
    for in_use, run in groupby(blocks, lambda block: str(block["state"]).startswith(ACTIVE)):
        if in_use:
            found = [*run]
            yield found[0]["address"], sum(block["size"] for block in found)


class _Memory:
    """A device pointer, as other libraries describe theirs (the CUDA array interface, version 3)."""

    def __init__(self, run: Run) -> None:
        address, size = run
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _view(run: Run, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(run), device=device)
