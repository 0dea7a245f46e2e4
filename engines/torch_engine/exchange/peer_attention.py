"""Ulysses and AllGather-KV for plain modules, through peer memory: copy engines carry heads while others are attended.

Ulysses: only the first part's way there, the last part's way back and the barriers are exposed. So there are three
parts, and the first and the last are single key heads. Nothing is packed: rows go from the projections' output to
attention's input, and from there into the columns of the result. Key heads are sent with all queries they serve. Parts
are attended on two streams in turn, so idle multiprocessors continue with the next part.

Two barriers wait for queries: one for the first part, one for all others. A barrier occupies a multiprocessor, and
attention starts one block on each and divides its work among them beforehand. A barrier that waits while a long part
starts would make one of its blocks begin late, and the whole part end late.

One memory each way is enough: a rank writes into an inbox only after a barrier that its owner passes after reading it.
Queries are sent after the previous call's last barrier, which the owner reaches after attention. Results are sent after
a barrier of this call's queries, which the owner reaches after reading the last result.

AllGather-KV: copy engines bring every rank the keys and values of all; queries and results stay in place. A processor
that makes queries last hides the exchange behind their projection (``EarlyKernel``). Padding rows are left out. Each
rank receives 2 G x (W - 1) / W of a token's heads for every token; with grouped heads that is little compared with
Ulysses: 2 (G + H) x (W - 1) / W for every W-th token.

Dims: B batch, L own queries, K own keys, W ranks, D head dim. H and G are heads of queries and of keys; h and g are
heads of one rank in one part. Ulysses: M = W x L all queries, N = W x K all keys. AllGather-KV: M all keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from engines.core.attention import EarlyKernel, Kernel
from engines.core.layout import Rows, TokenLayout
from engines.fast.interface import GRAPH_PRIORITY, SideStream, wait_for
from engines.parallel.collectives import Axis
from engines.parallel.key_rows import streams_of
from engines.parallel.local_attention import take_rows
from engines.torch_engine.exchange.heads import MaskedAttend
from engines.torch_engine.exchange.peer_heads import one_operation, two_operations
from engines.torch_engine.exchange.peer_memory import PeerMemory, copy_heads, copy_streams


def peer_ulysses(attend: MaskedAttend, axis: Axis, device: torch.device) -> Kernel:
    """Return attention for the ranks of one host (see ``peer_memory.reachable``), which all make the same calls.

    No LSE and no prefix; queries and keys have heads in multiples of the axis' size.
    """
    return one_operation(PeerUlysses(attend, axis, device), axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Slices of one rank's heads, which are sent together."""

    queries: slice
    """Range of its query heads."""
    keys: slice
    """Range of its key heads."""

    @property
    def qkv(self) -> tuple[slice, slice, slice]:
        return self.queries, self.keys, self.keys


def parts_of(heads: int, key_heads: int) -> tuple[Part, ...]:
    """Return the parts in the order in which they are sent and attended."""
    each = heads // key_heads
    bounds = itertools.pairwise(sorted({0, 1, key_heads - 1, key_heads}))
    return tuple(Part(queries=slice(each * start, each * stop), keys=slice(start, stop)) for start, stop in bounds)


class Inbox(NamedTuple):
    """One part's inbox on one rank."""

    q_BMhD: Tensor
    k_BNgD: Tensor
    v_BNgD: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Memory for one shape."""

    inbox: PeerMemory
    """Memory that this rank receives in: parts of queries, keys and values."""
    outbox: PeerMemory
    """Results, written by the ranks that attended."""
    parts: tuple[Part, ...]
    """Shares of each rank's heads, in the order in which they are sent."""
    inboxes: tuple[tuple[Inbox, ...], ...]
    """Inboxes by part and rank."""
    outboxes: tuple[Tensor, ...]
    """All ranks' results, (B, L, W, H / W, D)."""

    def await_queries(self, sends: Sequence[Sequence[torch.cuda.Event | None]], channel: int) -> None:
        """Make the current stream wait for all ranks' copies of some parts; ``sends`` are the ends of this rank's."""
        for event in itertools.chain(*sends):
            wait_for(event)
        self.inbox.barrier(channel=channel)


class PeerUlysses:
    """Attention over the tokens of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(self, attend: MaskedAttend, axis: Axis, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        self._streams = copy_streams(axis, device, to_self=True)
        # The long part starts before the last one, which then fills idle multiprocessors at its end.
        self._second_stream = SideStream(device, "every other part", priority=GRAPH_PRIORITY - 1)
        self._memories: dict[tuple[int, ...], _Memory] = {}

    def __call__(self, q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return the result of this rank's queries, contiguous."""
        memory = self._memory(q_BLHD, k_BKGD)
        qkv = tuple(torch.unflatten(x.contiguous(), 2, (self._axis.size, -1)) for x in (q_BLHD, k_BKGD, v_BKGD))
        sends = [self._send(qkv, memory, part) for part in range(len(memory.parts))]
        self._second_stream.follow()  # after everything before this call, but no part of it
        memory.await_queries(sends[:1], channel=0)
        pending = [self._attend_part(memory, 0, mask_BN)]  # held until the copies have ended
        if sends[1:]:
            with self._second_stream.run(after_current=False):
                memory.await_queries(sends[1:], channel=1)
            arrived = self._second_stream.record()
            for part in range(1, len(sends)):
                with self._second_stream.run(after_current=False) if part % 2 else nullcontext():
                    wait_for(arrived)
                    pending.append(self._attend_part(memory, part, mask_BN))
        for stream in (self._second_stream, *self._streams.values()):
            stream.wait()
        memory.outbox.barrier(channel=0)
        return memory.outboxes[self._axis.index].reshape(q_BLHD.shape).clone()

    def _send(self, qkv: tuple[Tensor, ...], memory: _Memory, number: int) -> list[torch.cuda.Event | None]:
        """Start one part's copies; return the events after which they have ended."""
        for rank, stream in self._streams.items():
            with stream.run():
                for target, x, heads in zip(memory.inboxes[number][rank], qkv, memory.parts[number].qkv, strict=True):
                    first = self._axis.index * x.shape[1]
                    copy_heads(target[:, first : first + x.shape[1]], x[:, :, rank, heads])
        return [stream.record() for stream in self._streams.values()]

    def _attend_part(self, memory: _Memory, number: int, mask_BN: Tensor | None) -> Tensor:
        """Attend one part and start the copies of its result; return the tensor that they read."""
        out_BMhD = self._attend(*memory.inboxes[number][self._axis.index], mask_BN).contiguous()
        out_BWLhD = torch.unflatten(out_BMhD, 1, (self._axis.size, -1))
        for rank, stream in self._streams.items():
            with stream.run():
                target = memory.outboxes[rank][:, :, self._axis.index, memory.parts[number].queries]
                copy_heads(target, out_BWLhD[:, rank])
        return out_BMhD

    def _memory(self, q_BLHD: Tensor, k_BKGD: Tensor) -> _Memory:
        key = (*q_BLHD.shape, *k_BKGD.shape)
        if key not in self._memories:
            self._memories[key] = self._open(q_BLHD, k_BKGD)
        return self._memories[key]

    def _open(self, q_BLHD: Tensor, k_BKGD: Tensor) -> _Memory:
        (batch, length, heads, dim), (_, num_keys, key_heads, _), world = q_BLHD.shape, k_BKGD.shape, self._axis.size
        for number in (heads, key_heads):
            assert number % world == 0, f"{number} heads cannot be divided over {world} ranks"
        parts = parts_of(heads // world, key_heads // world)
        inbox = PeerMemory.open(q_BLHD.numel() + 2 * k_BKGD.numel(), q_BLHD, self._axis, use="queries of a module")
        outbox = PeerMemory.open(q_BLHD.numel(), q_BLHD, self._axis, use="results of a module")
        shapes = [
            (batch, world * rows, heads_slice.stop - heads_slice.start, dim)
            for part in parts
            for rows, heads_slice in zip((length, num_keys, num_keys), part.qkv, strict=True)
        ]
        ranks = [_split(view, shapes) for view in inbox.views_W]
        return _Memory(
            inbox=inbox,
            outbox=outbox,
            parts=parts,
            inboxes=tuple(
                tuple(Inbox(*each[first : first + 3]) for each in ranks) for first in range(0, len(shapes), 3)
            ),
            outboxes=tuple(view.view(batch, length, world, -1, dim) for view in outbox.views_W),
        )


def _split(x_N: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return consecutive pieces of the given shapes."""
    pieces = torch.split(x_N, [math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def peer_allgather_kv(
    attend: MaskedAttend, axis: Axis, layout: Callable[[], TokenLayout], device: torch.device
) -> EarlyKernel:
    """Return attention for the ranks of one host (see ``peer_memory.reachable``), each with its chunk of a layout.

    ``layout`` gives it at each call; the streams are always the same. No LSE and no prefix; any number of heads.
    """
    return two_operations(PeerKeys(attend, axis, layout, device), axis)


class PeerKeys:
    """Attention to the keys of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(
        self, attend: MaskedAttend, axis: Axis, layout: Callable[[], TokenLayout], device: torch.device
    ) -> None:
        self._attend, self._axis, self._layout = attend, axis, layout
        self._streams = copy_streams(axis, device, to_self=True)
        self._sent: _SentKeys | None = None

    def __call__(self, q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return the result of this rank's queries, contiguous."""
        self._send(k_BKGD, v_BKGD, "keys of a module")
        return self.attend(q_BLHD, mask_BN)

    def send(self, k_BKGD: Tensor, v_BKGD: Tensor) -> None:
        """See ``KeysFirst.send``. Memory is shared by calls for the same streams, which follow one another.

        A compiler may run attention of other streams, as those of clip and sound, between this and ``attend``.
        """
        self._send(k_BKGD, v_BKGD, f"keys sent early of {streams_of(self._layout())}")

    def _send(self, k_BKGD: Tensor, v_BKGD: Tensor, use: str) -> None:
        assert self._sent is None, "keys are sent before those sent last were attended to"
        rows = _key_rows(self._layout())
        shared, keys_values = self._memory(k_BKGD, rows.num, use)
        sent = k_BKGD.contiguous(), v_BKGD.contiguous()
        shared.barrier(channel=0)  # all ranks have read the previous call's keys
        first, own = rows.offsets[self._axis.index], rows.by_rank[self._axis.index]
        for rank, stream in self._streams.items():
            with stream.run():
                _copy_rows(sent, own, keys_values[rank], first)
        self._sent = _SentKeys(shared, keys_values[self._axis.index], sent, rows.valid)

    def attend(self, q_BLHD: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """See ``KeysFirst.attend``. The result is contiguous."""
        assert self._sent is not None, "no keys were sent"
        (shared, keys_values_2BMGD, _, valid), self._sent = self._sent, None
        for stream in self._streams.values():
            stream.wait()
        shared.barrier(channel=1)
        mask_BM = mask_BN if mask_BN is None or valid is None else take_rows(mask_BN, valid)
        k_BMGD, v_BMGD = keys_values_2BMGD
        return self._attend(q_BLHD, k_BMGD, v_BMGD, mask_BM).contiguous()

    def _memory(self, k_BKGD: Tensor, num_keys: int, use: str) -> tuple[PeerMemory, tuple[Tensor, ...]]:
        """Return the shared memory, and in it each rank's ``keys_values_2BMGD``."""
        batch, _, *head = k_BKGD.shape
        shape = torch.Size((2, batch, num_keys, *head))
        shared = PeerMemory.open(shape.numel(), k_BKGD, self._axis, use=use)
        return shared, tuple(view.view(shape) for view in shared.views_W)


class _SentKeys(NamedTuple):
    """Keys and values on their way."""

    shared: PeerMemory
    """Memory in which all ranks receive them."""
    keys_values_2BMGD: Tensor
    """This rank's part of it."""
    sent: tuple[Tensor, Tensor]
    """Own keys and values, held until they have arrived."""
    valid: Rows | None
    """Unpadded rows of all ranks' chunks (None: all)."""


class _KeyRows(NamedTuple):
    """Where the unpadded keys of a layout come from, and go to."""

    by_rank: tuple[Rows, ...]
    """Rows of each rank's chunk; none if there are fewer tokens than ranks."""
    offsets: tuple[int, ...]
    """Place of each rank's first key among those of all ranks."""
    num: int
    """Keys of all ranks."""
    valid: Rows | None
    """Rows of all ranks' chunks (None: all)."""


@lru_cache(maxsize=256)
def _key_rows(layout: TokenLayout) -> _KeyRows:
    chunks = (layout.valid_rows(rank, 1) for rank in range(layout.num_chunks))
    by_rank = tuple(((0, layout.chunk_length),) if rows is None else rows for rows in chunks)
    *offsets, num = itertools.accumulate((sum(stop - start for start, stop in rows) for rows in by_rank), initial=0)
    return _KeyRows(by_rank, tuple(offsets), num, layout.valid_rows(0, layout.num_chunks))


def _copy_rows(sent: tuple[Tensor, Tensor], rows: Rows, target_2BMGD: Tensor, first: int) -> None:
    """Copy the given rows of keys and values, to ``first`` and after it."""
    for source_BKGD, part_BMGD in zip(sent, target_2BMGD, strict=True):
        place = first
        for start, stop in rows:
            copy_heads(part_BMGD[:, place : place + stop - start], source_BKGD[:, start:stop])
            place += stop - start
