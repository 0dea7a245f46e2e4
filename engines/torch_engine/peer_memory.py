"""Memory that the ranks of one host write for one another: plain peer mappings over NVLink, no multicast."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engines.parallel.collectives import Axis, all_gather


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

        Equal calls get the same memory: ``use`` tells apart what is in use at one time. Nothing is given back before
        the process ends, because PyTorch's pool of such memory must stay equal on all ranks, and when a rank collects
        its garbage is its own affair.
        """
        key = (axis, use, numel, sample.dtype, sample.device)
        if key not in _OPENED:
            _OPENED[key] = cls._new(numel, sample, axis)
        return _OPENED[key]

    @classmethod
    def _new(cls, numel: int, sample: Tensor, axis: Axis) -> PeerMemory:
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(numel, dtype=sample.dtype, device=sample.device)
        # Both calls leave work on the default stream (signals zeroed, pointers uploaded), whatever stream is current.
        torch.cuda.synchronize(sample.device)
        handle: Any = symmetric.rendezvous(mine, cast(Any, axis.group))
        torch.cuda.synchronize(sample.device)
        # The handle counts from the start of the segment that holds ``mine``, which is equal on all ranks.
        start = (mine.data_ptr() - handle.buffer_ptrs[axis.index]) // mine.element_size()
        views = tuple(handle.get_buffer(rank, (numel,), mine.dtype, start) for rank in range(axis.size))
        assert views[axis.index].data_ptr() == mine.data_ptr(), "peer memory is not where its handle says"
        return cls(mine=mine, views_W=views, addresses_W=addresses_of(views), handle=handle)

    def barrier(self, channel: int) -> None:
        """What every rank wrote, as far as its current stream has waited for it, is there when this stream goes on."""
        self.handle.barrier(channel=channel)


_OPENED: dict[Hashable, PeerMemory] = {}


def reachable(axis: Axis, device: torch.device) -> bool:
    """Whether all ranks of the axis are on one host whose GPUs reach each other's memory. All of them make the call."""
    if device.type != "cuda":
        return False
    host = zlib.crc32(socket.gethostname().encode())
    number = torch.cuda.current_device()
    mine = torch.tensor([host, number], dtype=torch.int64, device=device)
    hosts, numbers = all_gather(mine, axis).T.tolist()
    if len(set(hosts)) > 1 or len(set(numbers)) < len(numbers):  # a rank that sees its own GPU only calls it 0
        return False
    return all(torch.cuda.can_device_access_peer(number, other) for other in numbers if other != number)


def addresses_of(tensors: Iterable[Tensor]) -> Tensor:
    """Of their first elements, int64, on their device: for kernels that choose among them."""
    several = tuple(tensors)
    return torch.tensor([tensor.data_ptr() for tensor in several], dtype=torch.int64, device=several[0].device)
