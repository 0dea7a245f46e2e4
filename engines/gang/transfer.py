"""A job's state from one rank to the others of its gang: what a change of its team costs."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.gang.errors import portable

ALIGNMENT = 16
"""Bytes at whose multiples tensors begin inside the one message; every dtype can be read there."""


def transfer(state: Any, *, source: int, rank: int, device: torch.device) -> Any:
    """The ``state`` of rank ``source``, on every rank; all ranks of the gang make the call.

    Tensors on ``device`` go as one message between the devices, all else (pickled) before it. What keeps the state
    from being pickled is raised on every rank.
    """
    packed: list[Any] = [None, 0]
    tensors: list[Tensor] = []
    if rank == source:
        packed, tensors = _packed(state, device)
    dist.broadcast_object_list(packed, src=source, device=device)
    skeleton, num_bytes = packed
    if isinstance(skeleton, Exception):
        raise skeleton
    if num_bytes:
        message = _joined(tensors, num_bytes, device) if rank == source else _empty(num_bytes, device)
        dist.broadcast(message, src=source)
    return state if rank == source else unpack(skeleton, message if num_bytes else _empty(0, device))


def _packed(state: Any, device: torch.device) -> tuple[list[Any], list[Tensor]]:
    """What is told first (the skeleton, or why there is none; the message's size), and the message's tensors."""
    try:
        skeleton, tensors = pack(state, device)
    except Exception as error:  # the other ranks wait, and must hear of it
        return [portable(error), 0], []
    return [skeleton, sum(_padded_bytes(x) for x in tensors)], tensors


def pack(state: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """``state`` without its tensors on ``device``, and these, each once."""
    file = io.BytesIO()
    packer = _Packer(file, device)
    packer.dump(state)
    return file.getvalue(), packer.tensors


def unpack(skeleton: bytes, message: Tensor) -> Any:
    return _Unpacker(io.BytesIO(skeleton), message).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._device_type = device.type
        self._places: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._next = 0

    def persistent_id(self, obj: Any) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        """Where the tensor begins in the message, its shape and its dtype."""
        if not isinstance(obj, Tensor) or obj.device.type != self._device_type:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = (self._next, tuple(obj.shape), obj.dtype)
            self._next += _padded_bytes(obj)
            self.tensors.append(obj)  # which also keeps its id from being taken again
        return self._places[id(obj)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, message: Tensor) -> None:
        super().__init__(file)
        self._message = message
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, place: Any) -> Tensor:
        start, shape, dtype = place
        if start not in self._made:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            self._made[start] = self._message[start : start + num_bytes].view(dtype).view(shape)
        return self._made[start]


def _padded_bytes(x: Tensor) -> int:
    """Returns at least one unit, so that no two tensors begin at one place."""
    return max(1, -(-x.numel() * x.element_size() // ALIGNMENT)) * ALIGNMENT


def _joined(tensors: list[Tensor], num_bytes: int, device: torch.device) -> Tensor:
    message, start = _empty(num_bytes, device), 0
    for x in tensors:
        as_bytes = x.detach().contiguous().view(-1).view(torch.uint8)
        message[start : start + as_bytes.numel()].copy_(as_bytes)
        start += _padded_bytes(x)
    return message


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
