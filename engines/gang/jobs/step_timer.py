"""Step times of a rank: of its own process, or of a device that still works when the rank takes the next plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch


class StepTimer:
    """Times steps that end when their calls return, with moves before and latents after. Call methods in order."""

    def __init__(self) -> None:
        self._arrived_s = 0.0
        self._sequence: int | None = None

    def arrive(self) -> None:
        """Record the arrival of a plan."""
        self._arrived_s = time.perf_counter()

    def begin(self, sequence: int) -> None:
        """Begin the plan's step, to which all following calls belong."""
        self._sequence = sequence

    def launch(self) -> None:
        """Record that the step's forwards begin. Earlier work, such as a job's begin, may leave the device idle."""

    def end(self) -> None:
        """End the calls of the step."""

    def wait(self, num_in_flight: int) -> None:
        """Wait until at most ``num_in_flight`` of the steps so far are unfinished."""

    def settle(self) -> None:
        """Wait until all calls so far have been executed."""

    def ended_ms(self) -> dict[int, float]:
        """Return the times of steps that ended since the last call, by the sequence of their plans."""
        sequence, self._sequence = self._sequence, None
        return {} if sequence is None else {sequence: (time.perf_counter() - self._arrived_s) * 1e3}

    def running_ms(self) -> float:
        """Return the time since the device began the forwards of the last step; 0 before, and on a CPU."""
        return 0.0


class Mark(Protocol):
    """An event in the queue of a device, as ``torch.cuda.Event``: reached when all work queued before it is done."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds between two reached marks."""
        ...


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in a device's queue."""

    sequence: int
    """Number of its plan."""
    begin: Mark
    """Reached when the device can begin it."""
    end: Mark
    """Reached when its last kernel has ended."""


class CudaStepTimer(StepTimer):
    """Times steps in the queue of a device. One step waits there while the previous one runs, to hide call overhead.

    A rank continues when the previous step has ended or, if it returns latents, its own. The time is that of the device
    alone, from the moment when it can begin a step to the step's end. A mark recorded before a step's calls is reached
    when the previous step has ended, or at once. So neither waits of the host nor idle time of the device count. Moves
    come before the mark, because all ranks meet for them. ``now_s`` is a clock of the host.
    """

    def __init__(self, new_mark: Callable[[], Mark], now_s: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._new_mark, self._now_s = new_mark, now_s
        self._in_flight: deque[TimedStep] = deque()
        self._last: TimedStep | None = None
        self._reached: tuple[Mark, float] | None = None
        """A mark, and when the device reached it by the host's clock."""
        self._launched_s = 0.0

    def arrive(self) -> None: ...

    def begin(self, sequence: int) -> None:
        timed = TimedStep(sequence, self._new_mark(), self._new_mark())
        is_idle = self._last is None or self._last.end.query()
        timed.begin.record()
        self._launched_s = self._now_s()
        if is_idle:
            self._reached = timed.begin, self._launched_s
        self._in_flight.append(timed)
        self._last = timed

    def launch(self) -> None:
        self._launched_s = self._now_s()

    def end(self) -> None:
        self._in_flight[-1].end.record()

    def wait(self, num_in_flight: int) -> None:
        for timed in list(self._in_flight)[: max(0, len(self._in_flight) - num_in_flight)]:
            if not timed.end.query():
                timed.end.synchronize()
                self._reached = timed.end, self._now_s()

    def settle(self) -> None:
        mark = self._new_mark()
        mark.record()
        mark.synchronize()

    def ended_ms(self) -> dict[int, float]:
        """Query without waiting: a step that the rank did not wait for is returned with a later report."""
        ended: dict[int, float] = {}
        while self._in_flight and self._in_flight[0].end.query():
            timed = self._in_flight.popleft()
            ended[timed.sequence] = timed.begin.elapsed_time(timed.end)
        return ended

    def running_ms(self) -> float:
        """See ``StepTimer.running_ms``. A host that launches slowly reports a step when the device is well in it."""
        if self._last is None or self._reached is None or not self._last.begin.query():
            return 0.0
        mark, reached_s = self._reached
        begun_s = reached_s + mark.elapsed_time(self._last.begin) / 1e3
        return max(0.0, 1e3 * (self._now_s() - max(begun_s, self._launched_s)))


def step_timer(device: torch.device) -> StepTimer:
    """Return the timer for steps on ``device``."""
    return CudaStepTimer(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else StepTimer()
