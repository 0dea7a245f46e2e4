"""The process group of a benchmark that ``torchrun`` started. Imports torch alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start_distributed() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. A single rank needs no process group."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and torch.cuda.is_available():
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", pg_options=options, device_id=torch.device("cuda", rank))
    elif world > 1:
        dist.init_process_group("gloo")
    return rank, world
