"""What steps take a rank: on its own process, or on a device that works on while the rank takes the next plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch


class StepTimer:
    """Times steps that are over when their calls return. What comes with a plan counts: moves before the step, and
    latents that are handed out after it. A rank calls the methods in this order."""

    def __init__(self) -> None:
        self._arrived_s = 0.0
        self._sequence: int | None = None

    def arrive(self) -> None:
        """A plan is there."""
        self._arrived_s = time.perf_counter()

    def begin(self, sequence: int) -> None:
        """Begin its step: what is called from now on belongs to it."""
        self._sequence = sequence

    def end(self) -> None:
        """End the calls of the step."""

    def wait(self, num_under_way: int) -> None:
        """Return when no more than so many of the steps so far are under way."""

    def settle(self) -> None:
        """Return when all that was called for is done."""

    def ended_ms(self) -> dict[int, float]:
        """Return what steps took that are over and were not returned before, by the sequences of their plans."""
        sequence, self._sequence = self._sequence, None
        return {} if sequence is None else {sequence: (time.perf_counter() - self._arrived_s) * 1e3}


class Mark(Protocol):
    """A place in the queue of a device, as ``torch.cuda.Event`` is: reached when all that was queued before it is."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds between two marks that were reached."""
        ...


@dataclass(frozen=True, slots=True)
class _Timed:
    sequence: int
    begin: Mark
    end: Mark


class CudaStepTimer(StepTimer):
    """Times steps in the queue of a device. One waits there while the one before it runs, which hides the overhead of
    calls: a rank goes on when the step before is over, or, if it hands out latents, its own.

    The device's time alone counts, from when it could begin a step until it has ended it. A mark recorded before the
    calls of a step is reached when the step before has ended, or at once if that was long ago. So neither waits of the
    host nor idle time of the device count. Moves come before the mark: all ranks meet for them.
    """

    def __init__(self, new_mark: Callable[[], Mark]) -> None:
        super().__init__()
        self._new_mark = new_mark
        self._under_way: deque[_Timed] = deque()

    def arrive(self) -> None: ...

    def begin(self, sequence: int) -> None:
        timed = _Timed(sequence, self._new_mark(), self._new_mark())
        timed.begin.record()
        self._under_way.append(timed)

    def end(self) -> None:
        self._under_way[-1].end.record()

    def wait(self, num_under_way: int) -> None:
        for timed in list(self._under_way)[: max(0, len(self._under_way) - num_under_way)]:
            timed.end.synchronize()

    def settle(self) -> None:
        mark = self._new_mark()
        mark.record()
        mark.synchronize()

    def ended_ms(self) -> dict[int, float]:
        """Ask without waiting: a step that the rank did not wait for is returned with a later report."""
        ended: dict[int, float] = {}
        while self._under_way and self._under_way[0].end.query():
            timed = self._under_way.popleft()
            ended[timed.sequence] = timed.begin.elapsed_time(timed.end)
        return ended


def step_timer(device: torch.device) -> StepTimer:
    """Return the timer for steps on ``device``."""
    return CudaStepTimer(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else StepTimer()
