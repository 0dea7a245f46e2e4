"""Side streams, so that work which does not depend on an exchange fills the time and the multiprocessors it leaves.

Inside a CUDA graph a lane becomes a parallel branch. On the CPU everything runs in program order.

Memory rule: what is allocated inside ``aside()`` may be read after ``join()`` and dropped at once: the next ``aside()``
waits for the main stream before it can reuse the block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from engines.core.resources import rank_resources


class NamedStreams(dict[Hashable, torch.cuda.Stream]):
    """The streams of a rank by device, name and priority."""


def named_stream(device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """One stream per name and device, shared by all who ask: PyTorch has 32 and hands the same ones out again.

    Lower priorities go first.
    """
    streams, key = rank_resources().get(NamedStreams), (device, name, priority)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]


class Lane:
    """The side stream of that name (none on the CPU, or if ``enabled`` is false: then the code runs in line)."""

    def __init__(self, device: torch.device, name: str, *, enabled: bool = True, priority: int = 0) -> None:
        in_use = enabled and device.type == "cuda"
        self._stream = named_stream(device, name, priority) if in_use else None

    @contextmanager
    def aside(self, *, after_main: bool = True) -> Iterator[None]:
        """Run the body on the side stream, after everything that the current stream was given so far.

        ``after_main=False`` goes on where the lane's last body ended: only for work that needs nothing newer.
        """
        if self._stream is None:
            yield
            return
        if after_main:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What the side stream was given so far, for ``wait_for`` (None: nothing runs aside)."""
        return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def wait_for(mark: torch.cuda.Event | None) -> None:
    """Make the current stream wait for what a lane had been given when it was marked."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)
