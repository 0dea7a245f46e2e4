"""Memory that the ranks of one host write for one another: plain peer mappings over NVLink, no multicast."""

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
from engines.parallel.collectives import Axis, all_gather

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_MS = 30_000
SEGMENT_BYTES, LEAST_BYTES = 2 * 2**20, 12 * 2**20
"""PyTorch's allocator gives 10 MiB and more a segment of their own, rounded up to 2 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """``mine`` is written by the others; ``views_W`` are all ranks' memories as this rank may write them.

    ``handle`` keeps the mappings alive.
    """

    mine: Tensor
    views_W: tuple[Tensor, ...]
    addresses_W: Tensor
    handle: Any

    @classmethod
    def open(cls, numel: int, sample: Tensor, axis: Axis, *, use: str) -> PeerMemory:
        """``numel`` elements of the dtype and device of ``sample``. All ranks of the axis call it in the same order.

        Calls of the same ``use`` share memory, of whatever size: steps of different shapes run one after the other.
        Nothing is given back before the rank ends: another rank's captured step may still write there. So memory is
        opened in powers of two, and all sizes together take less than four times what the largest needs.
        """
        opened = rank_resources().get(PeerMemories).opened.setdefault((axis, use, sample.dtype, sample.device), [])
        if not opened or opened[-1].mine.numel() < numel:
            opened.append(cls._new(1 << (numel - 1).bit_length(), sample, axis))
        return next(memory for memory in opened if memory.mine.numel() >= numel)._first(numel)

    def _first(self, numel: int) -> PeerMemory:
        return replace(self, mine=self.mine[:numel], views_W=tuple(view[:numel] for view in self.views_W))

    @classmethod
    def _new(cls, numel: int, sample: Tensor, axis: Axis) -> PeerMemory:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here needs it, and some hosts suffer
        symmetric = symmetric_memory()
        whole = symmetric.empty(_whole_segments(numel, sample), dtype=sample.dtype, device=sample.device)
        # Both calls leave work on the default stream (signals zeroed, pointers uploaded), whatever stream is current.
        torch.cuda.synchronize(sample.device)
        handle: Any = symmetric.rendezvous(whole, cast(Any, axis.group))
        torch.cuda.synchronize(sample.device)
        mine = whole[:numel]
        # The handle counts from the start of the segment that holds ``mine``, which is equal on all ranks.
        start = (mine.data_ptr() - handle.buffer_ptrs[axis.index]) // mine.element_size()
        views = tuple(handle.get_buffer(rank, (numel,), mine.dtype, start) for rank in range(axis.size))
        assert views[axis.index].data_ptr() == mine.data_ptr(), "peer memory is not where its handle says"
        return cls(mine=mine, views_W=views, addresses_W=addresses_of(views), handle=handle)

    def barrier(self, channel: int) -> None:
        """What every rank wrote, as far as its current stream has waited for it, is there when this stream goes on."""
        self.handle.barrier(channel=channel)


class PeerMemories:
    """What a rank shares with others: memory by team and use, each larger than the one before, and who can be reached.

    Closed after engines. A step ends with a gather of all its ranks, so when this rank's work is done on the device,
    nobody writes here any more.
    """

    def __init__(self) -> None:
        self.opened: dict[Hashable, list[PeerMemory]] = {}
        self.reached: dict[Hashable, bool] = {}

    def close(self) -> None:
        if self.opened and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.opened.clear()


def reachable(axis: Axis, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the ranks of the axis can write into each other's memory: one host, a GPU each, and a trial that works.

    All ranks make the call and get the same answer.
    """
    if device.type != "cuda":
        return False
    reached, key = rank_resources().get(PeerMemories).reached, (axis, device, dtype)
    if key not in reached:
        reached[key] = _reaches(axis, device, dtype)
        logger.info("ranks write into each other's memory: %s", reached[key], extra={"ranks": axis.ranks})
    return reached[key]


def _reaches(axis: Axis, device: torch.device, dtype: torch.dtype) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)
    names = (socket.gethostname(), str(properties.uuid), str(torch.cuda.current_device()))
    mine = torch.tensor([zlib.crc32(name.encode()) for name in names], dtype=torch.int64, device=device)
    hosts, gpus, numbers = all_gather(mine, axis).T.tolist()
    works = len(set(hosts)) == 1 and len(set(gpus)) == axis.size
    if works:
        if len(set(numbers)) < axis.size:  # a rank that sees its own GPU only calls it 0, as all others do theirs
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        works = _trial(axis, torch.zeros((), dtype=dtype, device=device))
    return works


def _trial(axis: Axis, sample: Tensor) -> bool:
    """Every rank writes its number into every rank's memory, and finds there what the others wrote."""
    try:
        memory = PeerMemory.open(axis.size, sample, axis, use="trial")
    except RuntimeError as error:
        logger.warning("memory cannot be shared between ranks %s: %s", axis.ranks, error)
        memory = None
    if not _all_agree(memory is not None, axis, sample):
        return False  # nobody may wait for a rank that has no memory
    assert memory is not None
    for view in memory.views_W:
        view[axis.index] = axis.index + 1
    memory.handle.barrier(channel=0, timeout_ms=TRIAL_TIMEOUT_MS)  # then it stops the process: better than to wait
    expected = torch.arange(1, axis.size + 1, dtype=sample.dtype, device=sample.device)
    return _all_agree(torch.equal(memory.mine, expected), axis, sample)


def _all_agree(mine: bool, axis: Axis, sample: Tensor) -> bool:
    return bool(all_gather(torch.tensor([mine], dtype=torch.int64, device=sample.device), axis).all())


def _whole_segments(numel: int, sample: Tensor) -> int:
    """So many elements that PyTorch's pool takes a segment of the driver's memory for them alone.

    Smaller ones share segments in the order in which they came; teams form in different orders on different ranks, and
    only equal segments can be mapped.
    """
    size_bytes = max(numel * sample.element_size(), LEAST_BYTES)
    return -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES // sample.element_size()


def addresses_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the addresses of their first elements, int64, on their device: for kernels that choose among them."""
    several = tuple(tensors)
    return torch.tensor([tensor.data_ptr() for tensor in several], dtype=torch.int64, device=several[0].device)


_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses tell


def copy_streams(axis: Axis, device: torch.device, *, to_self: bool) -> dict[int, SideStream]:
    """A stream to each other rank, from the right-hand neighbour on, so that no rank is written to by all at once; with
    ``to_self`` one more, the last, to this rank."""
    turns = (*range(1, axis.size), *[0] * to_self)
    return {(axis.index + turn) % axis.size: SideStream(device, f"copies {turn}") for turn in turns}


def copy_rows(target_RC: Tensor, source_RC: Tensor) -> None:
    """Copy rows on the current stream; columns lie side by side in both, rows at any distance.

    ``Tensor.copy_`` calls a copy engine for whole tensors alone, and starts a kernel for anything with gaps.
    """
    assert target_RC.shape == source_RC.shape, (target_RC.shape, source_RC.shape)
    assert target_RC.dtype == source_RC.dtype, (target_RC.dtype, source_RC.dtype)
    assert target_RC.stride(1) == source_RC.stride(1) == 1, (target_RC.stride(), source_RC.stride())
    if source_RC.device.type != "cuda":
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
    """``copy_rows`` of what has its heads side by side, in both."""
    for target_LHD, source_LHD in zip(target_BLHD, source_BLHD, strict=True):
        copy_rows(target_LHD.flatten(1), source_LHD.flatten(1))


@cache
def _runtime() -> Any:
    """The CUDA runtime that PyTorch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
