"""What all ranks of a gang know alike: each of them makes the same call, and gets the same answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def of_rank_0(ask: Callable[[], T]) -> T:
    """What ``ask`` answers on rank 0, on all ranks."""
    shared: list[Any] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]  # type: ignore[no-any-return]


def gathered(name: str) -> list[str]:
    """The names of all ranks, in their order."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return names


def is_anywhere(mine: bool, device: torch.device) -> bool:
    """Whether it is true of any rank."""
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def is_everywhere(mine: bool, device: torch.device) -> bool:
    """Whether it is true of all ranks."""
    return not is_anywhere(not mine, device)
