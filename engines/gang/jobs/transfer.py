"""A job's state from one rank to the others of its gang: what a change of its team costs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.rank import RankContext
from engines.core.transport.packing import empty, joined, message_bytes, pack, unpack
from engines.gang.errors import portable

REHEARSED_LENGTH = 2**20
"""The latents of a picture of 2048 x 2048 pixels, in FLUX.1's packing."""


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
        message = joined(tensors, device) if rank == source else empty(num_bytes, device)
        dist.broadcast(message, src=source)
    return state if rank == source else unpack(skeleton, message if num_bytes else empty(0, device))


def rehearse(context: RankContext) -> None:
    """Do what the first transfer from each rank would have to do besides: NCCL connects ranks for it, which took two
    H200s 0.33 s. All ranks of the gang make the call."""
    device = torch.device(context.device)
    for source in range(context.num_ranks) if context.num_ranks > 1 else ():
        transfer({"x_L": torch.zeros(REHEARSED_LENGTH, device=device)}, source=source, rank=context.rank, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _packed(state: Any, device: torch.device) -> tuple[list[Any], list[Tensor]]:
    """What is told first (the skeleton, or why there is none; the message's size), and the message's tensors."""
    try:
        skeleton, tensors = pack(state, device)
    except Exception as error:  # the other ranks wait, and must hear of it
        return [portable(error), 0], []
    return [skeleton, message_bytes(tensors)], tensors
