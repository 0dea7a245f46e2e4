"""Ulysses without a collective: each rank writes into its peers' memory, in the layout of the reader.

There are two ways to write. *Pushed*: the kernel that makes the data stores it straight into the peers' memory. No
other transfer is needed, but no product runs meanwhile. *Copied*: the kernel writes locally, and the copy engines
transfer the data while products run on all multiprocessors. There is one barrier each way.

One memory each way is enough: a rank writes into an inbox only after a barrier that its owner passes after reading it.
Queries of a block are sent after the previous block's last barrier, which the owner reaches after attention. Results
are sent after the barrier of this block's queries, which the owner reaches after reading the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from engines.core.attention import EarlyKernel, Kernel, Prefix, heads_of_one
from engines.core.resources import Numbered, rank_resources
from engines.fast.interface import wait_for
from engines.fast.kernels import HeadNorms
from engines.parallel.collectives import Axis, join_masks
from engines.torch_engine.exchange.heads import Attend, attend_tokens_first, drop_surplus
from engines.torch_engine.exchange.peer_memory import PeerMemory, addresses_of, copy_streams

Copies = tuple[torch.cuda.Event | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Memory for one shape: W ranks, h heads of one rank (see ``heads``)."""

    inbox: PeerMemory
    """Read as (all tokens, B, 3, h, D)."""
    outbox: PeerMemory
    """Read as (W, rows, h x D) or, pushed, as (rows, W x h x D)."""
    staging_WN: Tensor
    """Data to copy, by receiver."""
    pushed_W: Tensor
    """Addresses of the inboxes. A kernel adds the offset of own rows in an inbox."""
    staged_W: Tensor
    """Addresses of the staging memory less that offset; for the own share that of the own inbox."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSent:
    """Queries, keys and values that ranks are writing into each other's memory."""

    exchange: PeerHeads
    """Exchange that attends to them."""
    memory: _Memory
    """Memory of this shape."""
    qkv_LB3hD: Tensor
    """Values that this rank receives: all tokens, own heads."""
    num_rows: int
    """Own rows."""
    num_columns: int
    """Heads × D, of all heads."""
    copies: Copies
    """Events at the end of this rank's copies; empty if pushed."""

    def attend(self) -> PeerAttended:
        return self.exchange.attend(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAttended:
    """Results on their way back."""

    exchange: PeerHeads
    """Exchange that collects them."""
    memory: _Memory
    """Memory of this shape."""
    out_WRC: Tensor
    """Own results by receiver; it must live until the copies from it have ended."""
    num_columns: int
    """Heads × D, of all heads."""
    is_copied: bool
    """True if copies send them; else a kernel pushes them."""

    def collect(self) -> Tensor:
        return self.exchange.collect(self)


class PeerHeads:
    """A ``HeadExchange`` for the ranks of one host. Memory is made at a shape's first (uncaptured) call.

    Data is copied if other work runs beside the transfer, else pushed.
    """

    adds_bias = True

    def __init__(self, attend: Attend, axis: Axis, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        self._streams = copy_streams(axis, device, to_self=False)
        self._memories: dict[tuple[int, ...], _Memory] = {}

    def send(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> PeerSent:
        """Copy: the caller's work runs beside the transfer."""
        from engines.fast.triton_kernels import launch_to_peers

        memory, rows = self._memory(qkv_R3HD), qkv_R3HD.shape[0]
        launch_to_peers(qkv_R3HD, norms, batch, memory.staged_W, self._axis.index * (rows // batch))
        return self._sent(qkv_R3HD, batch, copies=self._copy_queries(memory))

    def send_run(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms, start: int, stop: int) -> None:
        """Push. Earlier contents of the other ranks' inboxes are protected by their barrier."""
        from engines.fast.triton_kernels import launch_to_peers

        memory, rows = self._memory(qkv_R3HD), qkv_R3HD.shape[0]
        first_token = (self._axis.index * rows + start) // batch
        run = norms.run(start, stop, batch)
        launch_to_peers(qkv_R3HD[start:stop], run, batch, memory.pushed_W, first_token)

    def send_rest(self, qkv_R3HD: Tensor, batch: int, norms: HeadNorms) -> PeerSent:
        return self._sent(qkv_R3HD, batch, copies=())

    def attend(self, sent: PeerSent) -> PeerAttended:
        """Attend to the heads that all ranks have written, and send the result back the same way."""
        for event in sent.copies:
            wait_for(event)
        sent.memory.inbox.barrier(channel=0)
        out_LBhD = attend_tokens_first(self._attend, sent.qkv_LB3hD).contiguous()
        out_WRC = out_LBhD.view(self._axis.size, sent.num_rows, -1)
        is_copied = bool(sent.copies)
        (self._copy_result if is_copied else self._push_result)(sent.memory, out_WRC)
        return PeerAttended(
            exchange=self, memory=sent.memory, out_WRC=out_WRC, num_columns=sent.num_columns, is_copied=is_copied
        )

    def collect(self, attended: PeerAttended) -> Tensor:
        """Return own rows once all ranks have written them: a group of columns per rank or, pushed, a single one."""
        if attended.is_copied:
            for stream in self._streams.values():
                stream.wait()
        attended.memory.outbox.barrier(channel=0)
        result, (_, rows, _) = attended.memory.outbox.local, attended.out_WRC.shape
        result_GRC = result.view(attended.out_WRC.shape) if attended.is_copied else result.view(1, rows, -1)
        return drop_surplus(result_GRC, attended.num_columns)

    def _sent(self, qkv_R3HD: Tensor, batch: int, copies: Copies) -> PeerSent:
        memory, (rows, _, heads, dim) = self._memory(qkv_R3HD), qkv_R3HD.shape
        received = memory.inbox.local.view(self._axis.size * rows // batch, batch, 3, -1, dim)
        return PeerSent(
            exchange=self, memory=memory, qkv_LB3hD=received, num_rows=rows, num_columns=heads * dim, copies=copies
        )

    def _copy_queries(self, memory: _Memory) -> Copies:
        for peer, stream in self._streams.items():
            with stream.run():
                target_WN = memory.inbox.views_W[peer].view_as(memory.staging_WN)
                target_WN[self._axis.index].copy_(memory.staging_WN[peer])
        return tuple(stream.record() for stream in self._streams.values())

    def _copy_result(self, memory: _Memory, out_WRC: Tensor) -> None:
        rank = self._axis.index
        for peer, stream in self._streams.items():
            with stream.run():
                memory.outbox.views_W[peer].view(out_WRC.shape)[rank].copy_(out_WRC[peer])
        with stream.run():  # the last stream
            memory.outbox.local.view(out_WRC.shape)[rank].copy_(out_WRC[rank])

    def _push_result(self, memory: _Memory, out_WRC: Tensor) -> None:
        from engines.fast.triton_kernels import push_columns

        push_columns(out_WRC, memory.outbox.addresses_W, self._axis.index)

    def _memory(self, qkv_R3HD: Tensor) -> _Memory:
        key = tuple(qkv_R3HD.shape)
        if key not in self._memories:
            self._memories[key] = self._open(qkv_R3HD)
        return self._memories[key]

    def _open(self, qkv_R3HD: Tensor) -> _Memory:
        world, rank = self._axis.size, self._axis.index
        rows, _, heads, dim = qkv_R3HD.shape
        num_results = rows * world * heads_of_one(heads, world) * dim
        inbox = PeerMemory.open(3 * num_results, qkv_R3HD, self._axis, use="queries")
        outbox = PeerMemory.open(num_results, qkv_R3HD, self._axis, use="results")
        staging_WN = _staging(3 * num_results, qkv_R3HD).view(world, -1)
        pushed_W = addresses_of(inbox.views_W)
        offset = rank * staging_WN.shape[1] * staging_WN.element_size()
        staged_W = addresses_of(staging_WN.unbind(0)) - offset
        staged_W[rank] = pushed_W[rank]
        return _Memory(inbox=inbox, outbox=outbox, staging_WN=staging_WN, pushed_W=pushed_W, staged_W=staged_W)


class StagingMemory(dict[Hashable, list[Tensor]]):
    """Memory by dtype and device, in ascending order of size; never freed, since captured steps hold its addresses."""


def _staging(num_elements: int, sample: Tensor) -> Tensor:
    """Return ``num_elements`` elements, shared by all shapes and teams: their steps run one after another.

    Sizes are powers of two, so together they take less than four times the largest need.
    """
    memories = rank_resources().get(StagingMemory).setdefault((sample.dtype, sample.device), [])
    if not memories or memories[-1].numel() < num_elements:
        memories.append(sample.new_empty(1 << (num_elements - 1).bit_length()))
    return next(memory for memory in memories if memory.numel() >= num_elements)[:num_elements]


class PeerAttention(Protocol):
    """Attention of own queries to the keys of all ranks. ``mask_BN`` is True for attended ones (None: all)."""

    def __call__(self, q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return ``out_BLHD``, contiguous."""
        ...


class KeysFirst(PeerAttention, Protocol):
    """The same in two calls, between which keys and values travel."""

    def send(self, k_BKGD: Tensor, v_BKGD: Tensor) -> None:
        """Start to send keys and values, which the caller keeps until ``attend``."""
        ...

    def attend(self, q_BLHD: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return the result for keys and values that were sent last."""
        ...


class PeerOperations(Numbered[PeerAttention]):
    """Operations of a rank. Captured steps may hold their memory."""


def one_operation(attention: PeerAttention, axis: Axis) -> Kernel:
    """Return a kernel without LSE and prefix, for ranks that all make the same calls."""
    return _kernel(rank_resources().get(PeerOperations).number_of(attention), axis)


def two_operations(attention: KeysFirst, axis: Axis) -> EarlyKernel:
    """Return the same in one operation, or in one that sends keys and values and one that attends to them."""
    number = rank_resources().get(PeerOperations).number_of(attention)

    def send(k_BKGD: Tensor, v_BKGD: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
        _send(k_BKGD, v_BKGD, source, number)
        return lambda q_BLHD: _attend(q_BLHD, k_BKGD, v_BKGD, number)

    return EarlyKernel(attend=_kernel(number, axis), send=send)


def _kernel(number: int, axis: Axis) -> Kernel:
    def peer_kernel(
        q_BLHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert prefix is None
        mask_BN = None if mask_BM is None else join_masks(mask_BM, axis)
        return _run(q_BLHD, k_BKGD, v_BKGD, mask_BN, number), q_BLHD.new_empty(0)

    return peer_kernel


@torch.library.custom_op("troupe::peer_attention", mutates_args=())
def _run(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, mask_BN: Tensor | None, number: int) -> Tensor:
    return rank_resources().get(PeerOperations)[number](q_BLHD, k_BKGD, v_BKGD, mask_BN)


@_run.register_fake
def _(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, mask_BN: Tensor | None, number: int) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


@torch.library.custom_op("troupe::peer_send", mutates_args=("source",))
def _send(k_BKGD: Tensor, v_BKGD: Tensor, source: Tensor, number: int) -> None:
    """Send keys and values. A compiler makes queries later, since it takes ``source``, which they need, for changed."""
    _keys_first(number).send(k_BKGD, v_BKGD)


@_send.register_fake
def _(k_BKGD: Tensor, v_BKGD: Tensor, source: Tensor, number: int) -> None:
    pass


@torch.library.custom_op("troupe::peer_attend", mutates_args=())
def _attend(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, number: int) -> Tensor:
    """Attend to what was sent. Keys and values are given again, or a compiler would reuse their memory meanwhile."""
    return _keys_first(number).attend(q_BLHD)


@_attend.register_fake
def _(q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, number: int) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


def _keys_first(number: int) -> KeysFirst:
    return cast(KeysFirst, rank_resources().get(PeerOperations)[number])
