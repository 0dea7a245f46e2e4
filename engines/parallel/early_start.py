"""Work of a rank before its model is loaded: process groups, the first exchange on each, the first kernels.

At the first call a library connects ranks, loads kernels and creates handles: seconds altogether. All of that releases
the interpreter's lock, so a thread does it while the main thread imports the model's library.

Weights are loaded after the exchanges. A copy to the GPU waits for running work with the driver's lock held. Such work
may be an exchange whose peer waits for the same lock. One of two ranks once hung while loading weights; this cause is
likely but not proved. The first kernels wait for no other rank, so they load beside the weights. The thread draws no
random numbers. It must import nothing, because it could wait for a module that the main thread is importing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

import torch
import torch.distributed as dist

from engines.core.engine import RankContext
from engines.core.resources import rank_resources
from engines.core.spec import aligned_runs, tiling_sizes
from engines.parallel.collectives import EXCHANGES, Axis
from engines.parallel.local_attention import local_kernel
from engines.parallel.mesh import Groups


class EarlyStart:
    """State of the early start in this process."""

    def __init__(self) -> None:
        self.future: Future[None] | None = None  # None before the start
        self.exchanges: Future[None] | None = None  # done once no exchange is left
        self.seconds: dict[str, float] = {}  # by part, as they end

    @contextmanager
    def timed(self, part: str, device: torch.device) -> Iterator[None]:
        """Record the time of the block, including the work it sent to ``device``."""
        start_s = time.monotonic()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[part] = time.monotonic() - start_s


def start_early(device: torch.device) -> None:
    """Start the thread. Call it after ``torch.distributed`` is initialised (a single rank needs no such call).

    Every rank of the gang makes the call. Until ``wait_for_first_exchanges``, ``wait_for_early_start`` or
    ``gang_groups`` returns, no other code of this process may exchange or make a process group. Code that needs an
    attention kernel waits for its choice.
    """
    start = rank_resources().get(EarlyStart)
    assert start.future is None or start.future.done(), "the early start is under way already"
    start.future, start.exchanges = Future(), Future()
    # A daemon thread: the process can still exit if an exchange hangs.
    Thread(target=_run, args=(start, device), name="early start", daemon=True).start()


def wait_for_first_exchanges() -> None:
    """Wait until the thread of ``start_early`` has made its exchanges: weights may be loaded. Raise what it raised."""
    start = rank_resources().get(EarlyStart)
    if start.exchanges is not None:
        start.exchanges.result()


def host_axis(context: RankContext) -> Axis:
    """Return the ranks on the caller's host, for exchanges before the early start is done. All ranks make the call.

    Only the main thread may exchange or make a process group from here on: the early start has ended its exchanges.
    """
    wait_for_first_exchanges()
    groups, size = Groups.of_gang(), context.num_ranks // context.num_hosts
    hosts = [tuple(range(first, first + size)) for first in range(0, context.num_ranks, size)]
    names = {ranks: groups.name(ranks) for ranks in hosts}
    own = hosts[context.rank // size]
    return Axis(ranks=own, index=own.index(context.rank), group=names[own])


def wait_for_early_start() -> dict[str, float]:
    """Return the seconds per part once the thread of ``start_early`` is done. Raise what it raised."""
    start = rank_resources().get(EarlyStart)
    if start.future is not None:
        start.future.result()
    return start.seconds


def gang_groups() -> Groups:
    """Wait for the early start and return the process groups that all engines of this process share."""
    wait_for_early_start()
    return Groups.of_gang()


def _run(start: EarlyStart, device: torch.device) -> None:
    assert start.future is not None
    assert start.exchanges is not None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        if dist.is_initialized():
            _warm_up_exchanges(start, device)
        start.exchanges.set_result(None)
        with start.timed("first kernels", device):
            _warm_up_kernels(device)
        start.future.set_result(None)
    except BaseException as error:  # otherwise the main thread would wait for ever
        if not start.exchanges.done():
            start.exchanges.set_exception(error)
        start.future.set_exception(error)


def _warm_up_exchanges(start: EarlyStart, device: torch.device) -> None:
    """Run every exchange on every aligned run with this rank, at two sizes: NCCL connects ranks differently at each."""
    groups, rank, num_ranks = Groups.of_gang(), dist.get_rank(), dist.get_world_size()
    runs = [ranks for team_size in tiling_sizes(num_ranks)[1:] for ranks in aligned_runs(num_ranks, team_size)]
    # Groups first: ranks outside a new group wait until its members have made it, some with the interpreter locked.
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


def _warm_up_kernels(device: torch.device) -> None:
    """Run attention and a product in the dtype that models use on this kind of device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q_BLHD = torch.zeros(1, 128, 4, 128, device=device, dtype=dtype)
    local_kernel(device, dtype)(q_BLHD, q_BLHD, q_BLHD)
    torch.nn.functional.linear(q_BLHD, q_BLHD[0, :, 0])
