"""Ulysses without a collective: each rank writes straight into the others' memory, in the layout that the reader wants.

Symmetric memory (plain peer mappings over NVLink, no multicast) and one barrier each way. The write of queries, keys
and values is the same pass that normalises and turns them, so the exchange costs no pass of its own.

Why one inbox each way is enough: a rank writes into an inbox only after a barrier that its owner passes after having
read it. Queries of a block are sent after the barrier of the last block's result, which the owner reaches after
attention; results are sent after the barrier of this block's queries, which the owner reaches after it has read the
last result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engines.parallel.collectives import Axis
from engines.torch_engine.head_exchange import Attend, Exchanged, attend_tokens_first
from engines.torch_engine.kernels import HeadNorms
from engines.torch_engine.lanes import Lane

ADDRESS = torch.int64


@dataclass(frozen=True, slots=True)
class Inbox:
    """Memory that the other ranks write. ``handle`` keeps the mapping, ``addresses_W`` are all ranks' inboxes."""

    memory: Tensor
    handle: Any
    addresses_W: Tensor

    @classmethod
    def open(cls, numel: int, sample: Tensor, group: str) -> Inbox:
        """Every rank of the group must make this call, in the same order."""
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(numel, dtype=sample.dtype, device=sample.device)
        handle: Any = symmetric.rendezvous(memory, cast(Any, group))
        return cls(memory, handle, torch.tensor(handle.buffer_ptrs, dtype=ADDRESS, device=sample.device))


class PeerHeads:
    """A ``HeadExchange`` for the ranks of one host. Inboxes are made at a shape's first (uncaptured) call."""

    def __init__(self, attend: Attend, axis: Axis, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        self._lane = Lane(device, "peers", priority=-1)
        self._inboxes: dict[tuple[int, ...], tuple[Inbox, Inbox]] = {}

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> Exchanged:
        from engines.torch_engine.kernels.heads_triton import launch_to_peers

        rows, _, heads, dim = qkv_R3HD.shape
        inbox, outbox = self._open(qkv_R3HD, batch)
        with self._lane.aside():
            launch_to_peers(qkv_R3HD, norms, batch, inbox.addresses_W, self._axis.index * (rows // batch))
            inbox.handle.barrier(channel=0)
        each = heads // self._axis.size
        received = inbox.memory.view(self._axis.size * rows // batch, batch, 3, each, dim)
        return Exchanged(parts=(received, outbox.memory.view(1, rows, heads * dim), qkv_R3HD), num_rows=rows)

    def attend(self, sent: Exchanged) -> Exchanged:
        from engines.torch_engine.kernels.push_triton import push_columns

        received, result, _ = sent.parts
        self._lane.join()
        out_LBHD = attend_tokens_first(self._attend, received).contiguous()
        _, outbox = self._inboxes[self._key(sent.num_rows, received.shape[1], result.shape[-1])]
        with self._lane.aside():
            push_columns(out_LBHD.view(self._axis.size, sent.num_rows, -1), outbox.addresses_W, self._axis.index)
            outbox.handle.barrier(channel=1)
        return Exchanged(parts=(result, out_LBHD), num_rows=sent.num_rows)

    def collect(self, attended: Exchanged) -> tuple[Tensor, ...]:
        self._lane.join()
        return (attended.parts[0],)

    def _open(self, qkv_R3HD: Tensor, batch: int) -> tuple[Inbox, Inbox]:
        rows, _, heads, dim = qkv_R3HD.shape
        key = self._key(rows, batch, heads * dim)
        if key not in self._inboxes:
            numel = rows * heads * dim
            self._inboxes[key] = (
                Inbox.open(3 * numel, qkv_R3HD, self._axis.group),
                Inbox.open(numel, qkv_R3HD, self._axis.group),
            )
        return self._inboxes[key]

    def _key(self, rows: int, batch: int, channels: int) -> tuple[int, ...]:
        return rows, batch, channels
