"""Highest values while a block runs, such as the memory that all processes hold on the first GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TypeVar

from benchmarks.results import in_gib

EVERY_S = 0.1

T = TypeVar("T")


@contextmanager
def samples_of(look: Callable[[], T], every_s: float) -> Iterator[list[T]]:
    """Call ``look`` before, after, and every ``every_s`` during the block. The list is complete after the block."""
    seen, is_over = [look()], Event()

    def watch() -> None:
        while not is_over.wait(every_s):
            seen.append(look())

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()
        seen.append(look())


@dataclass(slots=True)
class Peak:
    """Bytes held on the first GPU. All are 0 without a GPU."""

    before: int = 0
    highest: int = 0
    after: int = 0

    def rounded(self) -> dict[str, float]:
        """Return GiB by field."""
        values = {"before": self.before, "highest": self.highest, "after": self.after}
        return {name: in_gib(value) for name, value in values.items()}


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Yield the peak, which is complete after the block."""
    peak, seen = Peak(), [0]
    try:
        with samples_of(held_bytes, EVERY_S) as seen:
            yield peak
    finally:
        peak.before, peak.highest, peak.after = seen[0], max(seen), seen[-1]


def held_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free
