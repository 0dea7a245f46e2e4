"""Peer memory: ranks of one host write into each other's memory, by plain NVLink mappings without multicast."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from engines.core.resources import rank_resources
from engines.core.torch_private import symmetric_memory
from engines.fast.interface import SideStream
from engines.parallel.collectives import Axis, all_gather, count_exchange

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_MS = 30_000
SEGMENT_BYTES, MIN_BYTES = 2 * 2**20, 12 * 2**20
"""PyTorch's allocator gives an allocation of 10 MiB or more its own segment, rounded up to 2 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """Memory on each rank of an axis, written by the others."""

    local: Tensor
    """This rank's own."""
    views_W: tuple[Tensor, ...]
    """All ranks' memories, as this rank may write them."""
    addresses_W: Tensor
    """int64, the addresses of ``views_W`` for kernels."""
    handle: Any
    """Keeps the mappings alive."""

    @classmethod
    def open(cls, numel: int, sample: Tensor, axis: Axis, *, use: str) -> PeerMemory:
        """Return ``numel`` elements of the dtype and device of ``sample``. All ranks of the axis open in one order.

        Calls with the same ``use`` share memory of any size: steps of different shapes run one after another. Nothing
        is freed before the rank ends, because another rank's captured step may still write there. Sizes are powers of
        two, so together they take less than four times the largest need.
        """
        opened = rank_resources().get(PeerMemories).opened.setdefault((axis, use, sample.dtype, sample.device), [])
        if not opened or opened[-1].local.numel() < numel:
            opened.append(cls._new(1 << (numel - 1).bit_length(), sample, axis))
        return next(memory for memory in opened if memory.local.numel() >= numel)._first(numel)

    def _first(self, numel: int) -> PeerMemory:
        return replace(self, local=self.local[:numel], views_W=tuple(view[:numel] for view in self.views_W))

    @classmethod
    def _new(cls, numel: int, sample: Tensor, axis: Axis) -> PeerMemory:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # unused here, and harmful on some hosts
        symmetric = symmetric_memory()
        count_exchange()  # other ranks wait in the rendezvous for one that fails before it
        whole = symmetric.empty(_whole_segments(numel, sample), dtype=sample.dtype, device=sample.device)
        # Both calls leave work on the default stream (signals zeroed, pointers uploaded), not on the current one.
        torch.cuda.synchronize(sample.device)
        handle: Any = symmetric.rendezvous(whole, cast(Any, axis.group))
        torch.cuda.synchronize(sample.device)
        local = whole[:numel]
        # The handle counts from the start of the segment that holds ``local``, which is equal on all ranks.
        start = (local.data_ptr() - handle.buffer_ptrs[axis.index]) // local.element_size()
        views = tuple(handle.get_buffer(rank, (numel,), local.dtype, start) for rank in range(axis.size))
        assert views[axis.index].data_ptr() == local.data_ptr(), "peer memory is not where its handle says"
        return cls(local=local, views_W=views, addresses_W=addresses_of(views), handle=handle)

    def barrier(self, channel: int) -> None:
        """Wait until every rank's writes, up to its current stream's barrier, are visible to this stream."""
        count_exchange()
        self.handle.barrier(channel=channel)


class PeerMemories:
    """Memories shared with other ranks, by team and use in ascending order of size, and reachability by team.

    Closed after engines. A step ends with a gather of all its ranks, so no rank writes here once this rank's device is
    idle.
    """

    def __init__(self) -> None:
        self.opened: dict[Hashable, list[PeerMemory]] = {}
        self.is_reachable: dict[Hashable, bool] = {}

    def close(self) -> None:
        if self.opened and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.opened.clear()


def reachable(axis: Axis, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the ranks can write into each other's memory: one host, a GPU each, and a successful trial.

    All ranks make the call and get the same answer.
    """
    if device.type != "cuda":
        return False
    is_reachable, key = rank_resources().get(PeerMemories).is_reachable, (axis, device, dtype)
    if key not in is_reachable:
        is_reachable[key] = _test_reach(axis, device, dtype)
        logger.info("ranks write into each other's memory: %s", is_reachable[key], extra={"ranks": axis.ranks})
    return is_reachable[key]


def _test_reach(axis: Axis, device: torch.device, dtype: torch.dtype) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)
    names = (socket.gethostname(), str(properties.uuid), str(torch.cuda.current_device()))
    local = torch.tensor([zlib.crc32(name.encode()) for name in names], dtype=torch.int64, device=device)
    hosts, gpus, numbers = all_gather(local, axis).T.tolist()
    works = len(set(hosts)) == 1 and len(set(gpus)) == axis.size
    if works:
        if len(set(numbers)) < axis.size:  # ranks that see only their own GPU all call it 0
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        works = _trial(axis, torch.zeros((), dtype=dtype, device=device))
    return works


def _trial(axis: Axis, sample: Tensor) -> bool:
    """Write this rank's number into every rank's memory, and check the numbers of the others."""
    try:
        memory = PeerMemory.open(axis.size, sample, axis, use="trial")
    except RuntimeError as error:
        logger.warning("memory cannot be shared between ranks %s: %s", axis.ranks, error)
        memory = None
    if not _all_agree(memory is not None, axis, sample):
        return False  # no rank may wait for one without memory
    assert memory is not None
    for view in memory.views_W:
        view[axis.index] = axis.index + 1
    memory.handle.barrier(channel=0, timeout_ms=TRIAL_TIMEOUT_MS)  # kills the process instead of hanging
    expected = torch.arange(1, axis.size + 1, dtype=sample.dtype, device=sample.device)
    return _all_agree(torch.equal(memory.local, expected), axis, sample)


def _all_agree(local: bool, axis: Axis, sample: Tensor) -> bool:
    return bool(all_gather(torch.tensor([local], dtype=torch.int64, device=sample.device), axis).all())


def _whole_segments(numel: int, sample: Tensor) -> int:
    """Return the number of elements that gets its own segment of the driver's memory in PyTorch's pool.

    Smaller allocations share segments in order of arrival. Teams form in different orders on different ranks, and only
    equal segments can be mapped.
    """
    size_bytes = max(numel * sample.element_size(), MIN_BYTES)
    return -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES // sample.element_size()


def addresses_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the addresses of the tensors' first elements, int64, on their device, for kernels that choose one."""
    several = tuple(tensors)
    return torch.tensor([tensor.data_ptr() for tensor in several], dtype=torch.int64, device=several[0].device)


_ANY_DIRECTION = 4  # cudaMemcpyDefault: derived from the addresses


def copy_streams(axis: Axis, device: torch.device, *, to_self: bool) -> dict[int, SideStream]:
    """Return a stream per other rank, right-hand neighbour first; ``to_self`` adds a last one to this rank.

    The order spreads the writes: the ranks do not all write to one rank at once.
    """
    turns = (*range(1, axis.size), *[0] * to_self)
    return {(axis.index + turn) % axis.size: SideStream(device, f"copies {turn}") for turn in turns}


def copy_rows(target_RC: Tensor, source_RC: Tensor) -> None:
    """Copy rows on the current stream; columns are adjacent in both, rows at any distance.

    ``Tensor.copy_`` uses a copy engine for whole tensors only, and starts a kernel for anything with gaps. A copy by
    rows within one GPU is a slow kernel (45 MB in rows of 2 KiB: 605 us on an H200), so rows without gaps go as a
    whole.
    """
    assert target_RC.shape == source_RC.shape, (target_RC.shape, source_RC.shape)
    assert target_RC.dtype == source_RC.dtype, (target_RC.dtype, source_RC.dtype)
    assert target_RC.stride(1) == source_RC.stride(1) == 1, (target_RC.stride(), source_RC.stride())
    if source_RC.device.type != "cuda" or (source_RC.is_contiguous() and target_RC.is_contiguous()):
        target_RC.copy_(source_RC)
        return
    rows, columns = source_RC.shape
    size = source_RC.element_size()
    target = ctypes.c_void_p(target_RC.data_ptr()), ctypes.c_size_t(target_RC.stride(0) * size)
    source = ctypes.c_void_p(source_RC.data_ptr()), ctypes.c_size_t(source_RC.stride(0) * size)
    extent = ctypes.c_size_t(columns * size), ctypes.c_size_t(rows)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = _runtime().cudaMemcpy2DAsync(*target, *source, *extent, _ANY_DIRECTION, stream)
    if code:
        raise RuntimeError(f"cudaMemcpy2DAsync of {rows} rows of {columns * size} bytes failed with code {code}")


def copy_heads(target_BLHD: Tensor, source_BLHD: Tensor) -> None:
    """Run ``copy_rows`` on tensors whose heads are adjacent."""
    for target_LHD, source_LHD in zip(target_BLHD, source_BLHD, strict=True):
        copy_rows(target_LHD.flatten(1), source_LHD.flatten(1))


@cache
def _runtime() -> Any:
    """Return the CUDA runtime that PyTorch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
