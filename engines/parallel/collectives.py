"""Collectives of the strategies, so that one module runs eagerly, compiles, is captured and exports.

They call PyTorch's functional ops only: traceable, one op per exchange, the group given by name. No other module of
``engines`` calls ``torch.distributed`` inside a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engines.core.torch_private import collective_ops

_num_started = 0


def num_started() -> int:
    """Return how many exchanges this process has started, without collectives in compiled code."""
    return _num_started


def count_exchange() -> None:
    """Count an exchange that starts now."""
    global _num_started
    if not torch.compiler.is_compiling():
        _num_started += 1


def _ops() -> Any:
    """Return the functional ops and count the call that follows."""
    count_exchange()
    return collective_ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis of a team's mesh, seen from one rank. Exchanges on an axis of size 1 are the identity."""

    ranks: tuple[int, ...]
    """Global numbers of the ranks along the axis."""
    index: int
    """The caller's place on it."""
    group: str = ""
    """Name of the process group; empty for an axis of size 1."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send ``x[j]`` to rank j of the axis; row i of the result came from rank i. ``x`` is contiguous, ``size`` rows."""
    return x if axis.size == 1 else wait(start_all_to_all(x, axis))


def start_all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Start ``all_to_all`` on an axis of several ranks. Pass the result to ``wait`` before reading it."""
    assert x.shape[0] == axis.size, (x.shape, axis)
    ones = [1] * axis.size
    return cast(Tensor, _ops().all_to_all_single(x, ones, ones, axis.group))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Return the ``x`` of every rank, stacked in rank order along a new first dim."""
    if axis.size == 1:
        return x[None]
    gathered = wait(_ops().all_gather_into_tensor(x.contiguous()[None], axis.size, axis.group))
    assert gathered.shape == (axis.size, *x.shape), (gathered.shape, x.shape, axis)
    return gathered


def gather_masks(mask_BM: Tensor, axis: Axis) -> Tensor:
    """Return the boolean mask of every rank, stacked in rank order along a new first dim; sent as bytes."""
    return all_gather(mask_BM.to(torch.uint8), axis).bool()


def join_masks(mask_BM: Tensor, axis: Axis) -> Tensor:
    """Return the boolean masks of all ranks, concatenated in rank order: (B, size·M)."""
    return gather_masks(mask_BM, axis).transpose(0, 1).flatten(1)


def gather_places(places_L: Tensor, axis: Axis) -> Tensor:
    """Return the token positions of every rank, stacked in rank order along a new first dim."""
    return all_gather(places_L.to(torch.int32), axis)


def join_places(places_L: Tensor, axis: Axis) -> Tensor:
    """Return the token positions of all ranks, concatenated in rank order: (size·L,)."""
    return gather_places(places_L, axis).flatten()


def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of ``x`` over the axis, bitwise equal on every rank."""
    if axis.size == 1:
        return x
    return wait(_ops().all_reduce(x.contiguous(), "sum", axis.group))


def start_rotation(x: Tensor, axis: Axis) -> Tensor:
    """Start sending ``x`` to the next rank and receiving from the previous one. Pass the result to ``wait``.

    An all-to-all with one non-empty split is the only functional send/receive on every backend. NCCL groups it.
    """
    send = [0] * axis.size
    receive = [0] * axis.size
    send[(axis.index + 1) % axis.size] = x.shape[0]
    receive[(axis.index - 1) % axis.size] = x.shape[0]
    return cast(Tensor, _ops().all_to_all_single(x.contiguous(), receive, send, axis.group))


def start_send(x: Tensor, pair: Axis) -> Tensor:
    """Start sending a flat ``x`` to rank 1 of a pair. Keep ``x`` until the result was passed to ``wait``."""
    return cast(Tensor, _ops().all_to_all_single(x.contiguous(), [0, 0], [0, x.numel()], pair.group))


def receive(num: int, like: Tensor, pair: Axis) -> Tensor:
    """Return ``num`` elements from rank 0 of a pair, with the dtype and device of ``like``."""
    return wait(_ops().all_to_all_single(like.new_empty(0), [num, 0], [0, 0], pair.group))


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Return the ``x`` of rank ``source`` (its place on the axis) on every rank. All ranks pass the same shape."""
    return x if axis.size == 1 else wait(_ops().broadcast(x.contiguous(), source, axis.group))


def wait(x: Tensor) -> Tensor:
    """Make the current stream (the caller, on the CPU) wait for an exchange."""
    return cast(Tensor, collective_ops.wait_tensor(x))


Exchange = Callable[[Tensor, Axis], Tensor]

EXCHANGES: dict[str, Exchange] = {
    "all_to_all": all_to_all,
    "all_gather": all_gather,
    "all_reduce": all_reduce_sum,
    "rotation": lambda x, axis: wait(start_rotation(x, axis)),
}
"""Exchanges by name, for measurements. Sizes are those of the tensor that a rank passes in."""
