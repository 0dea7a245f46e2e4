"""What an engine gives a hand-ordered step: the team's exchange of heads, and streams for work beside it.

Side streams, so that work which does not depend on an exchange fills the time and the multiprocessors it leaves.

Inside a CUDA graph a side stream becomes a parallel branch. On the CPU everything runs in program order.

Memory rule: what is allocated inside ``run()`` may be read after ``wait()`` and dropped at once: the next ``run()``
waits for the main stream before it can reuse the block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engines.core.resources import rank_resources
from engines.fast.kernels import HeadNorms


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


class AttendedHeads(Protocol):
    """Results on their way back to the ranks of their tokens."""

    def collect(self) -> Tensor:
        """Returns my rows of the result: groups ``x_GRC`` of columns, in the order of the heads."""
        ...


class SentHeads(Protocol):
    """Queries, keys and values on their way to the ranks of their heads."""

    def attend(self) -> AttendedHeads:
        """Attends to what has arrived, and starts sending the result back."""
        ...


class HeadExchange(Protocol):
    """Attention over the tokens of a team in three moments (send, attend, collect), so that other work fits between.

    ``adds_bias``: ``send`` writes all of q, k and v anew, and can add their bias for nothing on the way.
    Rows are tokens × batch, batch innermost; ``norms`` are those of all rows.
    """

    adds_bias: bool

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Normalises and turns q and k, and starts sending them and v. ``qkv`` may be overwritten.

        The caller has other work to do before ``attend``, and again before ``collect``.
        """
        ...

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Sends the rows from ``start`` to ``stop`` (whole tokens) before the others are there, if the exchange can."""
        ...

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Sends what ``send_run`` has not sent.

        Every row was passed to ``send_run``, and the current stream has waited for it; nothing runs beside this.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What an engine gives a fast model: the team's exchange, and side streams for the context and for the MLP.

    ``exchange_within(stream)`` is one for attention among the tokens of a single stream; all ranks ask for the same
    ones in the same order. ``cut(x, dim, stream)`` gives my rank's tokens of a tensor of all of a stream's.
    ``filled`` are the tokens of each stream, where a prompt is filled up; None where all are as long as they come.
    """

    exchange: HeadExchange
    exchange_within: Callable[[str], HeadExchange]
    context_stream: SideStream
    mlp_stream: SideStream
    cut: Callable[[Tensor, int, str], Tensor]
    filled: Mapping[str, int] | None = None
