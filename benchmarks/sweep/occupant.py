"""A process that holds the first GPU's memory, so that other processes find what a smaller card has.

    python -m benchmarks.sweep.occupant BYTES

It leaves BYTES, by plain allocations, and watches what is free until its standard input ends. It prints one line of
JSON when it holds the rest, and one at its end. Its own CUDA context is part of what it holds. All processes of an
application share what is left, as on a card of that size: their contexts, libraries and captured graphs count.

Three things are the larger GPU's: ``total_memory`` of the device, the speed, and the size of a context.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from benchmarks.application.memory import samples_of
from benchmarks.results import in_gib

T = TypeVar("T")

COMMAND = (sys.executable, "-m", "benchmarks.sweep.occupant")
STEP_BYTES, LEAST_BYTES = 2 << 20, 20 << 20
"""Torch allocates in such steps; of a smaller size than the second it would take more than was asked for."""
QUIET_S, QUIET_WITHIN_S = 1.0, 30.0
"""Other programs are at rest once the free memory is the same twice, so far apart."""
WATCH_S = 0.1
FREED_BYTES = 64 << 20
"""Tolerance of the free memory above what was left. If more is free, another program gave memory back."""
ENDS_WITHIN_S = 30.0


@contextmanager
def occupied(leave_bytes: int) -> Iterator[dict[str, float]]:
    """Leave ``leave_bytes`` of the first GPU during the block; nothing happens without GPUs.

    After the block the dictionary has what was left (``left_gib``), and the most of it that was held (``held_gib``).
    RuntimeError if less is free at the start, or if more became free than was left: other programs used the GPU.
    """
    found: dict[str, float] = {}
    if not torch.cuda.is_available():
        yield found
        return
    process = subprocess.Popen([*COMMAND, str(leave_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        left = _read(process.stdout.readline())["left"]
        try:
            yield found
        finally:
            seen = _read(process.communicate(timeout=ENDS_WITHIN_S)[0])
            found |= {"left_gib": in_gib(left), "held_gib": in_gib(left - seen["least"])}
    finally:
        process.kill()
        process.wait()
    if seen["most"] > left + FREED_BYTES:
        raise RuntimeError(f"{in_gib(seen['most'])} GiB became free, and {in_gib(left)} were left: end other programs")


def _read(line: str) -> dict[str, int]:
    """Return the bytes that the process printed. RuntimeError if it ended instead."""
    if not line:
        raise RuntimeError("the GPU's memory is not held: the last lines of standard error say why")
    said: dict[str, int] = json.loads(line)
    return said


def main() -> None:
    leave_bytes = int(sys.argv[1])
    wait_quiet(free_bytes)
    held = fill(leave_bytes, free_bytes, lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    with samples_of(free_bytes, WATCH_S) as seen:
        print(json.dumps({"left": free_bytes()}), flush=True)
        sys.stdin.read()
    print(json.dumps({"least": min(seen), "most": max(seen)}), flush=True)
    del held


def free_bytes() -> int:
    """Return what the driver has left for all processes."""
    return int(torch.cuda.mem_get_info(0)[0])


def wait_quiet(free: Callable[[], int], pause_s: float = QUIET_S) -> None:
    """Wait until ``free`` is the same twice, so that memory of programs that end is not held as if it were theirs."""
    before, end_s = free(), time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < end_s:
        time.sleep(pause_s)
        if (now := free()) == before:
            return
        before = now


def fill(leave_bytes: int, free: Callable[[], int], allocate: Callable[[int], T]) -> list[T]:
    """Return allocations that leave ``leave_bytes``, or up to ``LEAST_BYTES`` more. RuntimeError if less is free."""
    held: list[T] = []
    if free() < leave_bytes:
        raise RuntimeError(
            f"{in_gib(leave_bytes)} GiB are to be left, and {in_gib(free())} are free: end other programs"
        )
    while (surplus := free() - leave_bytes) >= LEAST_BYTES:
        held.append(allocate(surplus // STEP_BYTES * STEP_BYTES))
    return held


if __name__ == "__main__":
    main()
