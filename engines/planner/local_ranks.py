"""Ranks outside a gang: processes of this host that are started, give one answer, and end."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

Body = Callable[..., None]
"""Called in each rank's process: ``(rank, connection, *args)``. Rank 0 sends its answer through the connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """Running ranks. ``context`` watches their processes, ``receiver`` is where rank 0's answer arrives."""

    context: ProcessContext
    receiver: Connection

    def answer(self, within_s: float) -> Any:
        """Return what rank 0 sent.

        Raises RuntimeError with the last line of a rank's error as soon as one has failed, or if all ended without an
        answer, and TimeoutError when time is up.
        """
        end_s = time.monotonic() + within_s
        while True:
            ready = wait([self.receiver, *self.context.sentinels], max(0.0, end_s - time.monotonic()))
            if self.receiver in ready:
                return self.receiver.recv()
            if not ready:
                raise TimeoutError(f"no answer from {len(self.context.processes)} ranks in {within_s:.0f} s")
            if self._join(0):
                raise RuntimeError(f"all {len(self.context.processes)} ranks ended without an answer")

    def leave(self, within_s: float) -> None:
        """Wait until all ranks have ended, or time is up. RuntimeError for one that fails meanwhile."""
        end_s = time.monotonic() + within_s
        while not self._join(max(0.0, end_s - time.monotonic())) and time.monotonic() < end_s:
            pass

    def _join(self, timeout_s: float) -> bool:
        """Whether all have ended, after one more has or time is up."""
        try:
            return bool(self.context.join(timeout=timeout_s))
        except ProcessException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error


@contextmanager
def local_ranks(body: Body, num_ranks: int, args: tuple[Any, ...] = ()) -> Iterator[LocalRanks]:
    """Ranks that run ``body`` in processes of their own (spawned, so it must be picklable). None outlives the block."""
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    start: Any = start_processes
    context = start(body, args=(sender, *args), nprocs=num_ranks, join=False)
    try:
        yield LocalRanks(context=context, receiver=receiver)
    finally:
        for process in context.processes:
            process.kill()
            process.join()
