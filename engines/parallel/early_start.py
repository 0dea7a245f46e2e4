"""What a rank can do before its model is there: process groups, the first exchange on each, the first kernels.

A library connects ranks, loads kernels and makes its handles at the first call that needs them: seconds altogether. All
of that happens below Python, with the interpreter's lock released, so a thread does it while the main thread imports
the model's library. Weights come after it: a copy to the GPU waits for what is under way there, with the driver's lock
held, and what is under way may be an exchange that waits for another rank, whose thread waits for that lock in turn.
One of two ranks was seen to stop in the midst of its weights; that this was why was not proved.

The thread imports nothing, which could wait for a module that the main thread is importing: keep it so. It draws no
random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

import torch
import torch.distributed as dist

from engines.core.resources import rank_resources
from engines.core.spec import aligned_runs, tiling_sizes
from engines.parallel.collectives import EXCHANGES, Axis
from engines.parallel.local_attention import local_kernel
from engines.parallel.mesh import Groups


class EarlyStart:
    """``future``: the start that is under way, or is over; None before. ``seconds``: of its parts, as they end."""

    def __init__(self) -> None:
        self.future: Future[None] | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str, device: torch.device) -> Iterator[None]:
        """The block's time, and that of what it has sent to ``device``."""
        begun_s = time.monotonic()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[part] = time.monotonic() - begun_s


def start_early(device: torch.device) -> None:
    """Begin, in a thread, after ``torch.distributed`` is initialised (alone: without).

    Every rank of the gang makes the call. Until ``wait_for_early_start`` or ``gang_groups`` has returned, nothing else
    in this process may exchange, make a process group or choose among attention kernels.
    """
    start = rank_resources().get(EarlyStart)
    assert start.future is None or start.future.done(), "the early start is under way already"
    start.future = Future()
    # A daemon: where an exchange hangs, the process can still end.
    Thread(target=_fulfil, args=(start, device), name="early start", daemon=True).start()


def wait_for_early_start() -> dict[str, float]:
    """Return once ``start_early``'s thread is done, at once if there is none: the seconds of its parts. What it raised
    is raised here."""
    start = rank_resources().get(EarlyStart)
    if start.future is not None:
        start.future.result()
    return start.seconds


def gang_groups() -> Groups:
    """The groups that all engines of this process share, those of the early start among them; waits for it."""
    wait_for_early_start()
    return Groups.of_gang()


def _fulfil(start: EarlyStart, device: torch.device) -> None:
    assert start.future is not None
    try:
        _work(start, device)
        start.future.set_result(None)
    except BaseException as error:  # else the main thread would wait for ever
        start.future.set_exception(error)


def _work(start: EarlyStart, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own current device
    if dist.is_initialized():
        _exchange(start, device)
    with start.timed("first kernels", device):
        _compute(device)


def _exchange(start: EarlyStart, device: torch.device) -> None:
    """Every kind on every aligned run of ranks that this one is in, at a small and a large size: NCCL connects them
    differently.
    """
    groups, rank, num_ranks = Groups.of_gang(), dist.get_rank(), dist.get_world_size()
    runs = [ranks for team_size in tiling_sizes(num_ranks)[1:] for ranks in aligned_runs(num_ranks, team_size)]
    # Groups first: ranks outside a new one wait until those inside have made it, some with the interpreter locked.
    with start.timed("groups", device):
        names = {ranks: groups.name(ranks) for ranks in runs}
    sizes_bytes = (2**16, 2**24) if device.type == "cuda" else (2**10,)
    for ranks, name in names.items():
        if rank not in ranks:
            continue
        axis = Axis(ranks=ranks, index=ranks.index(rank), group=name)
        with start.timed(f"first exchanges of {axis.size}", device):
            for size_bytes in sizes_bytes:
                x = torch.zeros(axis.size, size_bytes // axis.size // 4, device=device)
                for exchange in EXCHANGES.values():
                    exchange(x, axis)


def _compute(device: torch.device) -> None:
    """Attention and a product in the dtype that models have on this kind of device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q_BLHD = torch.zeros(1, 128, 4, 128, device=device, dtype=dtype)
    local_kernel(device, dtype)(q_BLHD, q_BLHD, q_BLHD)
    torch.nn.functional.linear(q_BLHD, q_BLHD[0, :, 0])
