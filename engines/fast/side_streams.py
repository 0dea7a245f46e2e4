"""Side streams, so that work which does not depend on an exchange fills the time and the multiprocessors it leaves.

Inside a CUDA graph a side stream becomes a parallel branch. On the CPU everything runs in program order.

Memory rule: what is allocated inside ``run()`` may be read after ``wait()`` and dropped at once: the next ``run()``
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
    """Returns one stream per name and device, shared by all who ask: PyTorch has 32 and hands the same ones out again.

    Lower priorities go first.
    """
    streams, key = rank_resources().get(NamedStreams), (device, name, priority)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]


class SideStream:
    """The side stream of that name. On the CPU, and unless ``in_use``, there is none: the code runs in line."""

    def __init__(self, device: torch.device, name: str, *, in_use: bool = True) -> None:
        self._stream = named_stream(device, name) if in_use and device.type == "cuda" else None

    @contextmanager
    def run(self, *, after_current: bool = True) -> Iterator[None]:
        """Runs the body on the side stream, after everything that the current stream was given so far.

        ``after_current=False`` goes on where the last body ended: only for work that needs nothing newer.
        """
        if self._stream is None:
            yield
            return
        if after_current:
            self.follow()
        with torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """Makes the side stream wait for everything that the current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def record(self) -> torch.cuda.Event | None:
        """Returns what ``wait_for`` takes, reached when all that was given so far is done (None: it ran in line)."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def wait_for(event: torch.cuda.Event | None) -> None:
    """Makes the current stream wait for what a side stream had been given when ``record`` was called."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
