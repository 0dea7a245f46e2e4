"""Ulysses for modules that run as they are: copy engines carry some heads while others are attended.

What is seen of the exchange is the first part's way there, the last one's way back and a barrier a part. So there are
three parts, and the first and the last are single heads. Nothing is packed: rows go from where the projections left
them to where attention reads them, and from there into the columns of the result. To a compiler it is one operation.

One memory each way is enough: a rank writes into an inbox only after a barrier that its owner passes after having read
it. Queries are sent after the last barrier of the call before, which the owner reaches after attention; results are
sent after a barrier of this call's queries, which the owner reaches after it has read the last result.

Dims: B batch, L my tokens, M = W x L all tokens, H heads, D head dim, W ranks, h heads of one rank in one part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.core.kernel import Kernel, Prefix
from engines.core.resources import rank_resources
from engines.fast.side_streams import SideStream, wait_for
from engines.parallel.communication.collectives import Axis
from engines.torch_engine.exchange.copy_rows import copy_rows
from engines.torch_engine.exchange.heads import Attend
from engines.torch_engine.exchange.peer_memory import PeerMemory


class PeerOperations(list["PeerUlysses"]):
    """The operations of a rank, by their number in the graph of a compiled module.

    None is dropped before the rank ends: a captured step may hold its memory.
    """


def peer_ulysses(attend: Attend, axis: Axis, device: torch.device) -> Kernel:
    """Attention for the ranks of one host (see ``peer_memory.reachable``), which all make the same calls.

    No LSE, no mask and no prefix; queries, keys and values have one number of heads, a multiple of the axis' size.
    """
    operations = rank_resources().get(PeerOperations)
    number = len(operations)
    operations.append(PeerUlysses(attend, axis, device))

    def exchanged(
        q_BLHD: Tensor,
        k_BLHD: Tensor,
        v_BLHD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert mask_BM is None
        assert prefix is None
        assert q_BLHD.shape == k_BLHD.shape, (q_BLHD.shape, k_BLHD.shape)
        return _run(q_BLHD, k_BLHD, v_BLHD, number), q_BLHD.new_empty(0)

    return exchanged


@torch.library.custom_op("troupe::peer_ulysses", mutates_args=())
def _run(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, number: int) -> Tensor:
    return rank_resources().get(PeerOperations)[number](q_BLHD, k_BLHD, v_BLHD)


@_run.register_fake
def _(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, number: int) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


def parts_of(heads: int) -> tuple[slice, ...]:
    """Returns slices of one rank's heads, in the order in which they are sent and attended."""
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(sorted({0, 1, heads - 1, heads})))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """What one shape needs. ``inboxes`` are a part's of all ranks, each (q k v, B, M, h, D); ``outboxes``
    (B, L, W, H / W, D).

    ``parts`` are the heads of each part among a rank's.
    """

    inbox: PeerMemory
    outbox: PeerMemory
    parts: tuple[slice, ...]
    inboxes: tuple[tuple[Tensor, ...], ...]
    outboxes: tuple[Tensor, ...]


class PeerUlysses:
    """Attention over the tokens of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(self, attend: Attend, axis: Axis, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        # Others first, each rank from its right-hand neighbour on, so that no inbox is written by all at once.
        targets = ((axis.index + turn) % axis.size for turn in (*range(1, axis.size), 0))
        self._streams = {rank: SideStream(device, f"copies {turn}") for turn, rank in enumerate(targets)}
        self._memories: dict[tuple[int, ...], _Memory] = {}

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        """My tokens' result, contiguous."""
        memory = self._memory(q_BLHD)
        qkv = tuple(
            torch.unflatten(x_BLHD.contiguous(), 2, (self._axis.size, -1)) for x_BLHD in (q_BLHD, k_BLHD, v_BLHD)
        )
        left = [self._send(qkv, memory, part) for part in range(len(memory.parts))]
        kept = []  # until the copies have left
        for part, marks in enumerate(left):
            for mark in marks:
                wait_for(mark)
            memory.inbox.barrier(channel=part)
            kept.append(self._attend(*memory.inboxes[part][self._axis.index].unbind(0)).contiguous())
            self._send_back(kept[-1], memory, part)
        for stream in self._streams.values():
            stream.wait()
        memory.outbox.barrier(channel=0)
        return memory.outboxes[self._axis.index].reshape(q_BLHD.shape).clone()

    def _send(self, qkv: tuple[Tensor, ...], memory: _Memory, part: int) -> list[torch.cuda.Event | None]:
        """Start one part's copies; the marks after which they have left."""
        heads, length = memory.parts[part], qkv[0].shape[1]
        mine = slice(self._axis.index * length, (self._axis.index + 1) * length)
        for rank, stream in self._streams.items():
            with stream.run():
                for target_BMhD, x_BLWHD in zip(memory.inboxes[part][rank], qkv, strict=True):
                    _copy(target_BMhD[:, mine], x_BLWHD[:, :, rank, heads])
        return [stream.record() for stream in self._streams.values()]

    def _send_back(self, out_BMhD: Tensor, memory: _Memory, part: int) -> None:
        out_BWLhD = torch.unflatten(out_BMhD, 1, (self._axis.size, -1))
        for rank, stream in self._streams.items():
            with stream.run():
                _copy(memory.outboxes[rank][:, :, self._axis.index, memory.parts[part]], out_BWLhD[:, rank])

    def _memory(self, q_BLHD: Tensor) -> _Memory:
        key = tuple(q_BLHD.shape)
        if key not in self._memories:
            self._memories[key] = self._open(q_BLHD)
        return self._memories[key]

    def _open(self, q_BLHD: Tensor) -> _Memory:
        batch, length, heads, dim = q_BLHD.shape
        world = self._axis.size
        assert heads % world == 0, f"{heads} heads cannot be divided over {world} ranks"
        parts = parts_of(heads // world)
        inbox = PeerMemory.open(3 * q_BLHD.numel(), q_BLHD, self._axis, use="queries of a module")
        outbox = PeerMemory.open(q_BLHD.numel(), q_BLHD, self._axis, use="results of a module")
        sizes = [(part.stop - part.start) * 3 * batch * world * length * dim for part in parts]
        several = zip(*(torch.split(view, sizes) for view in inbox.views_W), strict=True)
        return _Memory(
            inbox=inbox,
            outbox=outbox,
            parts=parts,
            inboxes=tuple(tuple(x.view(3, batch, world * length, -1, dim) for x in inboxes) for inboxes in several),
            outboxes=tuple(view.view(batch, length, world, -1, dim) for view in outbox.views_W),
        )


def _copy(target_BLhD: Tensor, source_BLhD: Tensor) -> None:
    """Heads lie side by side in both."""
    for target_LhD, source_LhD in zip(target_BLhD, source_BLhD, strict=True):
        copy_rows(target_LhD.flatten(1), source_LhD.flatten(1))
