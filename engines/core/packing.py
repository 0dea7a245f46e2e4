"""A value with tensors in two parts: a pickled skeleton, and one message with the bytes of all tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which tensors are aligned inside the message; enough for every dtype."""


def pack(state: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """Return ``state`` without its tensors on ``device``, and these tensors, each once.

    ValueError, which names the place, for a random generator in ``state``.
    """
    file = io.BytesIO()
    packer = _Packer(file, state, device)
    packer.dump(state)
    return file.getvalue(), packer.tensors


def unpack(skeleton: bytes, message: Tensor) -> Any:
    """Return the value; its tensors are views of ``message``."""
    return _Unpacker(io.BytesIO(skeleton), message).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, state: Any, device: torch.device) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._state = state
        self.tensors: list[Tensor] = []
        self._device_type = device.type
        self._places: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._next = 0

    def persistent_id(self, obj: Any) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        """Return the tensor's start in the message, its shape and its dtype."""
        if isinstance(obj, torch.Generator):
            raise ValueError(
                f"{_expression_of(self._state, obj)} is a torch.Generator, which cannot be packed: torch would restore "
                "it from the wrong offset of the message. Store its state, a tensor, instead: get_state()"
            )
        if not isinstance(obj, Tensor) or obj.device.type != self._device_type:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = (self._next, tuple(obj.shape), obj.dtype)
            self._next += _padded_bytes(obj)
            self.tensors.append(obj)  # also keeps its id from being reused
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


def _expression_of(state: Any, target: object) -> str:
    """Return the expression that leads from ``state`` to ``target``."""
    place = _place(state, target, set())
    return f"state{place}" if place is not None else f"a pickled part of a {type(state).__name__}"


def _place(value: Any, target: object, seen: set[int]) -> str | None:
    if value is target:
        return ""
    if id(value) in seen:
        return None
    seen.add(id(value))
    for step, part in _parts(value):
        if (place := _place(part, target, seen)) is not None:
            return step + place
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of containers and the attributes of objects, each with its accessor."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [name for name in slots if name != "__dict__" and hasattr(value, name)]
    yield from ((f".{name}", getattr(value, name)) for name in [*names, *getattr(value, "__dict__", ())])


def _padded_bytes(x: Tensor) -> int:
    """Return the padded size, at least one unit, so that no two tensors start at the same place."""
    return max(1, -(-x.numel() * x.element_size() // ALIGNMENT)) * ALIGNMENT


def message_bytes(tensors: list[Tensor]) -> int:
    """Return the size of the tensors' message."""
    return sum(_padded_bytes(x) for x in tensors)


def joined(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the message of ``tensors``: their concatenated bytes, uint8."""
    message, start = empty(message_bytes(tensors), device), 0
    for x in tensors:
        dense = x.detach().contiguous()
        as_bytes = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one value may have a stride of 0
        message[start : start + as_bytes.numel()].copy_(as_bytes)
        start += _padded_bytes(x)
    return message


def empty(num_bytes: int, device: torch.device) -> Tensor:
    """Return an uninitialised message, uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
