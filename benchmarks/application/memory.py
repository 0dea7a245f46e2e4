"""What the first GPU holds, of all processes: before, at most, and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread

import torch

EVERY_S = 0.1


@dataclass(slots=True)
class Peak:
    """Bytes; all are 0 where there is no GPU."""

    before: int = 0
    highest: int = 0
    after: int = 0

    def rounded(self) -> dict[str, float]:
        """In GiB, by the names of the fields."""
        values = {"before": self.before, "highest": self.highest, "after": self.after}
        return {name: round(value / 2**30, 2) for name, value in values.items()}


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Looks every ``EVERY_S`` inside the block."""
    peak, is_over = Peak(before=held_bytes()), Event()

    def watch() -> None:
        while not is_over.wait(EVERY_S):
            peak.highest = max(peak.highest, held_bytes())

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()
        peak.after = held_bytes()
        peak.highest = max(peak.highest, peak.before, peak.after)


def held_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free
