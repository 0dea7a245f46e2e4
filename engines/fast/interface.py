"""The engine's services for a hand-ordered step: the team's exchange of heads, and side streams.

Work that does not depend on an exchange runs beside it on side streams, on the multiprocessors that it leaves. Inside
a CUDA graph a side stream becomes a parallel branch. On the CPU everything runs in program order.

Memory rule: memory allocated inside ``run()`` may be read after ``wait()`` and then dropped at once. The next ``run()``
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

GRAPH_PRIORITY = -1
"""Priority of the stream on which steps are captured; side streams use what it leaves. Replays keep priorities."""


class NamedStreams(dict[Hashable, torch.cuda.Stream]):
    """Streams of a rank by device, name and priority."""


def named_stream(device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the shared stream of that name on the device; PyTorch has only 32 and hands the same ones out again.

    Lower priorities run first.
    """
    streams, key = rank_resources().get(NamedStreams), (device, name, priority)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]


class SideStream:
    """The side stream of that name and priority. On the CPU, or unless ``in_use``, the code runs inline."""

    def __init__(self, device: torch.device, name: str, *, in_use: bool = True, priority: int = 0) -> None:
        self._stream = named_stream(device, name, priority) if in_use and device.type == "cuda" else None

    @contextmanager
    def run(self, *, after_current: bool = True) -> Iterator[None]:
        """Run the body on the side stream, after all work so far on the current stream.

        ``after_current=False`` continues after the last body, for work that needs nothing newer.
        """
        if self._stream is None:
            yield
            return
        if after_current:
            self.follow()
        with torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """Make the side stream wait for all work so far on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def record(self) -> torch.cuda.Event | None:
        """Return an event for ``wait_for``, reached when all work so far is done. None if it ran inline."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def wait_for(event: torch.cuda.Event | None) -> None:
    """Make the current stream wait for a side stream's work up to ``record``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class AttendedHeads(Protocol):
    """Attention results on their way back to the ranks of their tokens."""

    def collect(self) -> Tensor:
        """Return this rank's rows of the result: groups ``x_GRC`` of columns, in the order of the heads."""
        ...


class SentHeads(Protocol):
    """Queries, keys and values on their way to the ranks of their heads."""

    def attend(self) -> AttendedHeads:
        """Attend to the received heads and start sending the result back."""
        ...


class HeadExchange(Protocol):
    """Attention over the tokens of a team in three phases (send, attend, collect), so that other work fits between.

    Rows are tokens × batch, batch innermost; ``norms`` cover all rows.
    """

    adds_bias: bool
    """True if ``send`` rewrites all of q, k and v, and so can add their bias at no cost."""

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Normalise and rotate q and k, then start sending them and v. ``qkv`` may be overwritten.

        The caller has other work before ``attend``, and again before ``collect``.
        """
        ...

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Send the rows from ``start`` to ``stop`` (whole tokens) ahead of the others, if the exchange can."""
        ...

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> SentHeads:
        """Send the rows that ``send_run`` has not sent.

        Every row was passed to ``send_run`` and the current stream has waited for it; nothing runs beside this call.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """The engine's services for a fast model."""

    exchange: HeadExchange
    """Attention over all tokens of the team."""
    exchange_within: Callable[[str], HeadExchange]
    """Returns the exchange among the tokens of one stream. All ranks request the same ones in the same order.

    Exchanges share memory: no two of them run at the same time."""
    alone: HeadExchange
    """Attention over this rank's own rows alone, which may run beside an exchange."""
    context_stream: SideStream
    """CUDA stream for the context's rows, beside the latents'."""
    mlp_stream: SideStream
    """CUDA stream for MLPs beside attention."""
    cut: Callable[[Tensor, int, str], Tensor]
    """``cut(x, dim, stream)`` returns this rank's tokens of a tensor with all tokens of a stream."""
    filled: Mapping[str, int] | None = None
    """Unpadded tokens of each stream, if prompts are padded; else None."""
