"""Ulysses without a collective: each rank writes into the others' memory, in the layout that the reader wants.

Two ways to write. *Pushed*: the kernel that makes the data stores it straight into the peers' memory; nothing is left
to do, but no product runs meanwhile. *Copied*: the kernel writes here, and the copy engines carry it over while
products run on all multiprocessors. One barrier each way.

Why one memory each way is enough: a rank writes into an inbox only after a barrier that its owner passes after having
read it. Queries of a block are sent after the last barrier of the block before, which the owner reaches after
attention; results are sent after the barrier of this block's queries, which the owner reaches after it has read the
last result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.fast.kernels import HeadNorms
from engines.fast.side_streams import Lane, wait_for
from engines.parallel.collectives import Axis
from engines.torch_engine.exchange.heads import Attend, Exchanged, attend_tokens_first
from engines.torch_engine.exchange.peer_memory import PeerMemory, addresses_of


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Of one shape, P parts of heads, W ranks, h heads of one rank in one part.

    ``inbox_PWN`` is read as (P, all tokens, B, 3, h, D); ``outbox_PWN`` as (P, W, rows, h x D), or, pushed, as
    (rows, W x h x D). ``staging_PWN`` holds what is copied. A kernel adds the place of my rows in an inbox's part to
    the addresses it is given: ``pushed_PW`` are the inboxes' parts, ``staged_PW`` the staging memory's less that place
    (for my own share: my inbox).
    """

    inbox: PeerMemory
    outbox: PeerMemory
    staging_PWN: Tensor
    pushed_PW: Tensor
    staged_PW: Tensor


class PeerHeads:
    """A ``HeadExchange`` for the ranks of one host. Memory is made at a shape's first (uncaptured) call.

    What has work beside it is copied (unless ``copies`` is false), the rest pushed; with ``num_parts`` above 1 that is
    copied too, each part of the heads beside the attention of another.
    """

    adds_bias = True

    def __init__(
        self, attend: Attend, axis: Axis, device: torch.device, *, num_parts: int = 1, copies: bool = True
    ) -> None:
        self._attend, self._axis, self._num_parts, self._copies = attend, axis, num_parts, copies
        turns = range(1, axis.size)
        self._lanes = {(axis.index + turn) % axis.size: Lane(device, f"copies {turn}") for turn in turns}
        self._memories: dict[tuple[int, ...], _Memory] = {}

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, *, beside: bool) -> Exchanged:
        from engines.fast.kernels.heads_triton import launch_to_peers

        rows, _, heads, dim = qkv_R3HD.shape
        num_parts = 1 if beside else self._num_parts
        memory = self._memory(qkv_R3HD, num_parts)
        copied = (beside and self._copies) or num_parts > 1
        left = []
        for part, (part_R3HD, part_norms) in enumerate(_parts(qkv_R3HD, norms, num_parts)):
            addresses_W = (memory.staged_PW if copied else memory.pushed_PW)[part]
            launch_to_peers(part_R3HD, part_norms, batch, addresses_W, self._axis.index * (rows // batch))
            left.append(self._copy_queries(memory, part) if copied else ())
        each = heads // self._axis.size // num_parts
        received = memory.inbox.mine.view(num_parts, self._axis.size * rows // batch, batch, 3, each, dim)
        return Exchanged(parts=tuple(received.unbind(0)), num_rows=rows, left=tuple(left), memory=memory)

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Pushed. What was sent before lies in the inboxes of others already; a barrier of theirs keeps it safe."""
        from engines.fast.kernels.heads_triton import launch_to_peers

        memory, rows = self._memory(qkv_R3HD, 1), qkv_R3HD.shape[0]
        first_token = (self._axis.index * rows + start) // batch
        run = norms.run(start, stop, batch)
        launch_to_peers(qkv_R3HD[start:stop], run, batch, memory.pushed_PW[0], first_token)

    def sent(self, qkv_R3HD: Tensor, batch: int) -> Exchanged:
        memory, (rows, _, heads, dim) = self._memory(qkv_R3HD, 1), qkv_R3HD.shape
        received = memory.inbox.mine.view(self._axis.size * rows // batch, batch, 3, heads // self._axis.size, dim)
        return Exchanged(parts=(received,), num_rows=rows, left=((),), memory=memory)

    def attend(self, sent: Exchanged) -> Exchanged:
        memory: _Memory = sent.memory
        kept = []
        for part, (qkv_LB3HD, left) in enumerate(zip(sent.parts, sent.left, strict=True)):
            for mark in left:
                wait_for(mark)
            memory.inbox.barrier(channel=part)
            out_LBHD = attend_tokens_first(self._attend, qkv_LB3HD).contiguous()
            kept.append(out_LBHD.view(self._axis.size, sent.num_rows, -1))
            if left:
                self._copy_result(memory, part, kept[-1])
            else:
                self._push_result(memory, kept[-1])
        return replace(sent, parts=tuple(kept))

    def collect(self, attended: Exchanged) -> tuple[Tensor, ...]:
        memory: _Memory = attended.memory
        copied = bool(attended.left[0])
        if copied:
            for lane in self._lanes.values():
                lane.join()
        memory.outbox.barrier(channel=0)
        if not copied:
            return (memory.outbox.mine.view(1, attended.num_rows, -1),)
        return tuple(memory.outbox.mine.view(len(attended.parts), *attended.parts[0].shape).unbind(0))

    def _copy_queries(self, memory: _Memory, part: int) -> tuple[torch.cuda.Event | None, ...]:
        """Start one part's copies; the marks after which they have left."""
        for peer, lane in self._lanes.items():
            with lane.aside():
                target_WN = memory.inbox.views_W[peer].view_as(memory.staging_PWN)[part]
                target_WN[self._axis.index].copy_(memory.staging_PWN[part, peer])
        return tuple(lane.mark() for lane in self._lanes.values())

    def _copy_result(self, memory: _Memory, part: int, out_WRC: Tensor) -> None:
        mine, shape = self._axis.index, (memory.staging_PWN.shape[0], *out_WRC.shape)
        for peer, lane in self._lanes.items():
            with lane.aside():
                memory.outbox.views_W[peer].view(shape)[part, mine].copy_(out_WRC[peer])
        with lane.aside():  # the last of them
            memory.outbox.mine.view(shape)[part, mine].copy_(out_WRC[mine])

    def _push_result(self, memory: _Memory, out_WRC: Tensor) -> None:
        from engines.fast.kernels.push_triton import push_columns

        push_columns(out_WRC, memory.outbox.addresses_W, self._axis.index)

    def _memory(self, qkv_R3HD: Tensor, num_parts: int) -> _Memory:
        key = (num_parts, *qkv_R3HD.shape)
        if key not in self._memories:
            self._memories[key] = self._open(qkv_R3HD, num_parts)
        return self._memories[key]

    def _open(self, qkv_R3HD: Tensor, parts: int) -> _Memory:
        world, mine = self._axis.size, self._axis.index
        share = qkv_R3HD.numel() // world // parts
        assert share * world * parts == qkv_R3HD.numel(), f"{qkv_R3HD.shape} does not fit {world} ranks x {parts} parts"
        inbox = PeerMemory.open(qkv_R3HD.numel(), qkv_R3HD, self._axis, use=f"queries in {parts}")
        outbox = PeerMemory.open(qkv_R3HD.numel() // 3, qkv_R3HD, self._axis, use=f"results in {parts}")
        staging_PWN = _staging(qkv_R3HD).view(parts, world, share)
        inboxes = [view.view_as(staging_PWN) for view in inbox.views_W]
        pushed = [[inboxes[peer][part] for peer in range(world)] for part in range(parts)]
        place = mine * share * staging_PWN.element_size()
        pushed_PW = torch.stack([addresses_of(tensors) for tensors in pushed])
        staged_PW = torch.stack([addresses_of(part_WN.unbind(0)) for part_WN in staging_PWN]) - place
        staged_PW[:, mine] = pushed_PW[:, mine]
        return _Memory(inbox=inbox, outbox=outbox, staging_PWN=staging_PWN, pushed_PW=pushed_PW, staged_PW=staged_PW)


_STAGED: dict[Hashable, list[Tensor]] = {}
"""Each larger than the one before; kept, for captured steps hold their addresses."""


def _staging(sample: Tensor) -> Tensor:
    """As many elements as ``sample`` has, shared by all shapes and teams: their steps run one after the other.

    In powers of two, so that all sizes together take less than four times what the largest needs.
    """
    made = _STAGED.setdefault((sample.dtype, sample.device), [])
    if not made or made[-1].numel() < sample.numel():
        made.append(sample.new_empty(1 << (sample.numel() - 1).bit_length()))
    return next(memory for memory in made if memory.numel() >= sample.numel())[: sample.numel()]


def _parts(qkv_R3HD: Tensor, norms: HeadNorms, num_parts: int) -> Iterator[tuple[Tensor, HeadNorms]]:
    """Heads in runs of equal length, each with its bias."""
    parts = qkv_R3HD.chunk(num_parts, dim=2)
    biases = (None,) * len(parts) if norms.bias_3HD is None else norms.bias_3HD.chunk(num_parts, dim=1)
    for part_R3HD, bias_3HD in zip(parts, biases, strict=True):
        yield part_R3HD, replace(norms, bias_3HD=bias_3HD)
