"""Ulysses for modules that run as they are: copy engines carry the heads of one part while another is attended.

Nothing is packed: rows go from where the projections left them to where attention reads them, and from there into the
columns of the result. To a compiler it is one operation.

One memory each way is enough: a rank writes into an inbox only after a barrier that its owner passes after having read
it. Queries are sent after the last barrier of the call before, which the owner reaches after attention; results are
sent after a barrier of this call's queries, which the owner reaches after it has read the last result.

Dims: B batch, L my tokens, H heads, D head dim, W ranks, P parts, h = H / W / P heads of one rank in one part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.parallel.collectives import Axis
from engines.parallel.kernel import Kernel
from engines.parallel.ulysses import even_parts
from engines.torch_engine.copy_rows import copy_rows
from engines.torch_engine.head_exchange import Attend
from engines.torch_engine.lanes import named_stream
from engines.torch_engine.peer_memory import PeerMemory

_MADE: list[PeerUlysses] = []
"""By their number in the graph of a compiled module. Never dropped: a captured step may hold one's memory."""


def peer_ulysses(attend: Attend, axis: Axis, device: torch.device, num_parts: int) -> Kernel:
    """For the ranks of one host (see ``peer_memory.reachable``), all of which make the same calls. No log-sum-exp.

    ``num_parts``: shares of a rank's heads (fewer, if they cannot be shared out evenly).
    """
    number = len(_MADE)
    _MADE.append(PeerUlysses(attend, axis, device, num_parts))

    def exchanged(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, /) -> tuple[Tensor, Tensor]:
        return _run(q_BLHD, k_BLHD, v_BLHD, number), q_BLHD.new_empty(0)

    return exchanged


@torch.library.custom_op("troupe::peer_ulysses", mutates_args=())
def _run(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, number: int) -> Tensor:
    return _MADE[number](q_BLHD, k_BLHD, v_BLHD)


@_run.register_fake
def _(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, number: int) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Of one shape.

    ``inboxes`` are those of all ranks, as (P, q k v, B, W x L tokens, h x D); ``outboxes`` as (B, L, W, P, h x D).
    """

    inbox: PeerMemory
    outbox: PeerMemory
    inboxes: tuple[Tensor, ...]
    outboxes: tuple[Tensor, ...]


class PeerUlysses:
    """Attention over the tokens of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(self, attend: Attend, axis: Axis, device: torch.device, num_parts: int) -> None:
        self._attend, self._axis, self._num_parts = attend, axis, num_parts
        # Others first, each rank from its right-hand neighbour on, so that no inbox is written by all at once.
        self._targets = tuple((axis.index + turn) % axis.size for turn in (*range(1, axis.size), 0))
        self._streams = (
            tuple(named_stream(device, f"copies {turn}") for turn in range(axis.size)) if device.type == "cuda" else ()
        )
        self._memories: dict[tuple[int, ...], _Memory] = {}

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        """My tokens' result, contiguous."""
        memory = self._memory(q_BLHD)
        qkv = tuple(x_BLHD.contiguous() for x_BLHD in (q_BLHD, k_BLHD, v_BLHD))
        parts = range(memory.inboxes[0].shape[0])
        left = [self._send(qkv, memory, part) for part in parts]
        kept = []  # until the copies have left
        for part in parts:
            for event in left[part]:
                torch.cuda.current_stream().wait_event(event)
            memory.inbox.barrier(channel=part)
            kept.append(self._attend_part(memory, part, q_BLHD.shape[3]))
            self._send_back(kept[-1], memory, part)
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        memory.outbox.barrier(channel=0)
        return memory.outboxes[self._axis.index].reshape(q_BLHD.shape).clone()

    def _send(self, qkv: tuple[Tensor, ...], memory: _Memory, part: int) -> list[Any]:
        """Start one part's copies; the events after which they have left."""
        batch, length, _, _ = qkv[0].shape
        start, num_parts = self._axis.index * length, memory.inboxes[0].shape[0]
        events = []
        for rank, stream in self._copying():
            for which, x_BLHD in enumerate(qkv):
                x_BLWPC = x_BLHD.view(batch, length, self._axis.size, num_parts, -1)
                for index in range(batch):
                    target_LC = memory.inboxes[rank][part, which, index, start : start + length]
                    copy_rows(target_LC, x_BLWPC[index, :, rank, part])
            events += [] if stream is None else [stream.record_event()]
        return events

    def _attend_part(self, memory: _Memory, part: int, dim: int) -> Tensor:
        """Over all tokens: (B, W x L, h x D)."""
        inbox = memory.inboxes[self._axis.index][part]
        q_BMhD, k_BMhD, v_BMhD = inbox.view(*inbox.shape[:3], -1, dim).unbind(0)
        return self._attend(q_BMhD, k_BMhD, v_BMhD).flatten(2).contiguous()

    def _send_back(self, out_BMC: Tensor, memory: _Memory, part: int) -> None:
        out_BWLC = torch.unflatten(out_BMC, 1, (self._axis.size, -1))
        for rank, _ in self._copying():
            for index, out_WLC in enumerate(out_BWLC.unbind(0)):
                copy_rows(memory.outboxes[rank][index, :, self._axis.index, part], out_WLC[rank])

    def _copying(self) -> Iterator[tuple[int, torch.cuda.Stream | None]]:
        """Each rank with its stream as the current one, after everything that the caller's stream was given."""
        for turn, rank in enumerate(self._targets):
            stream = self._streams[turn] if self._streams else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                yield rank, stream

    def _memory(self, q_BLHD: Tensor) -> _Memory:
        key = tuple(q_BLHD.shape)
        if key not in self._memories:
            self._memories[key] = self._open(q_BLHD)
        return self._memories[key]

    def _open(self, q_BLHD: Tensor) -> _Memory:
        batch, length, heads, dim = q_BLHD.shape
        world = self._axis.size
        assert heads % world == 0, f"{heads} heads cannot be divided over {world} ranks"
        parts = even_parts(heads // world, self._num_parts)
        columns = heads // world // parts * dim
        inbox = PeerMemory.open(3 * q_BLHD.numel(), q_BLHD, self._axis, use="queries of a module")
        outbox = PeerMemory.open(q_BLHD.numel(), q_BLHD, self._axis, use="results of a module")
        return _Memory(
            inbox=inbox,
            outbox=outbox,
            inboxes=tuple(view.view(parts, 3, batch, world * length, columns) for view in inbox.views_W),
            outboxes=tuple(view.view(batch, length, world, parts, columns) for view in outbox.views_W),
        )
