"""A value with tensors as two: its skeleton, pickled, and one message with the bytes of all its tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes at whose multiples tensors begin inside the one message; every dtype can be read there."""


def pack(state: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """``state`` without its tensors on ``device``, and these, each once."""
    file = io.BytesIO()
    packer = _Packer(file, device)
    packer.dump(state)
    return file.getvalue(), packer.tensors


def unpack(skeleton: bytes, message: Tensor) -> Any:
    """The value, its tensors views of ``message``."""
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


def message_bytes(tensors: list[Tensor]) -> int:
    """The size of their message."""
    return sum(_padded_bytes(x) for x in tensors)


def joined(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The message of ``tensors``: their bytes one after the other, uint8."""
    message, start = empty(message_bytes(tensors), device), 0
    for x in tensors:
        dense = x.detach().contiguous()
        as_bytes = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one value may have a stride of 0
        message[start : start + as_bytes.numel()].copy_(as_bytes)
        start += _padded_bytes(x)
    return message


def empty(num_bytes: int, device: torch.device) -> Tensor:
    """Room for a message, uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
