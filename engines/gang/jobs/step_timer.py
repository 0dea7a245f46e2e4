"""What steps take a rank: in its own process, or on a device that works on while the rank takes the next plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in the queue of a device, as ``torch.cuda.Event`` is: reached when all that was queued before it is."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds between two marks that were reached."""
        ...


class Pace(Protocol):
    """Called by a rank around what it does of a plan, in this order."""

    def arrive(self) -> None:
        """A plan is there."""
        ...

    def begin(self, sequence: int) -> None:
        """Its step begins: what is called for it comes now."""
        ...

    def end(self) -> None:
        """All of the step was called for."""
        ...

    def wait(self, num_under_way: int) -> None:
        """Returns when no more of the steps so far are under way."""
        ...

    def settle(self) -> None:
        """Returns when all that was called for is done."""
        ...

    def ended_ms(self) -> dict[int, float]:
        """Returns what the steps took that are over and were not told of before, by the sequences of their plans."""
        ...


class HostPace:
    """Every step is over when its calls return. What comes with its plan counts: states that move before it, latents
    that are handed out after it."""

    def __init__(self) -> None:
        self._arrived_s = 0.0
        self._sequence: int | None = None

    def arrive(self) -> None:
        self._arrived_s = time.perf_counter()

    def begin(self, sequence: int) -> None:
        self._sequence = sequence

    def end(self) -> None: ...

    def wait(self, num_under_way: int) -> None: ...

    def settle(self) -> None: ...

    def ended_ms(self) -> dict[int, float]:
        sequence, self._sequence = self._sequence, None
        return {} if sequence is None else {sequence: (time.perf_counter() - self._arrived_s) * 1e3}


@dataclass(frozen=True, slots=True)
class _Timed:
    sequence: int
    begin: Mark
    end: Mark


class DevicePace:
    """The device has a queue. One step waits there while the one before it runs, so that the overhead of a call hides
    behind it: a rank goes on when the step before is over, or, if it hands out latents, its own.

    What counts is the device's time alone, from when it could begin with a step until it has ended it. A mark recorded
    before a step's calls is reached when the step before has ended, or at once if that was long ago: so neither what
    the host waits for nor what the device idles belongs to any step, and who asks later hears the same. States that
    move go before the mark: all ranks meet for them, and none for its own step.
    """

    def __init__(self, new_mark: Callable[[], Mark]) -> None:
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
        """Asks without waiting: of a step before which the rank did not wait, a later report tells."""
        ended: dict[int, float] = {}
        while self._under_way and self._under_way[0].end.query():
            timed = self._under_way.popleft()
            ended[timed.sequence] = timed.begin.elapsed_time(timed.end)
        return ended


def pace_on(device: torch.device) -> Pace:
    """Returns how steps go there: a GPU works on by itself, a CPU is the rank's own."""
    return DevicePace(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else HostPace()
