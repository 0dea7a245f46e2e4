"""AllGather-KV for modules that run as they are: copy engines bring every rank the keys and values of all.

Queries and results stay where they are. Keys go from where the projections left them to where attention reads them,
rows that only fill up a rank's tokens left out. With grouped heads that is little: of W ranks each receives
2 G x (W - 1) / W of a token's heads for every token, where Ulysses has 2 (G + H) x (W - 1) / W for every W-th.

Dims: B batch, L my queries, K my keys, M all keys; H and G heads of queries and of keys, D head dim.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from engines.core.kernel import Kernel
from engines.core.layout import Rows, TokenLayout
from engines.parallel.communication.collectives import Axis
from engines.torch_engine.exchange.copy_rows import copy_heads, copy_streams
from engines.torch_engine.exchange.heads import Attend
from engines.torch_engine.exchange.peer_memory import PeerMemory
from engines.torch_engine.exchange.peer_operation import one_operation


def peer_allgather_kv(attend: Attend, axis: Axis, layout: TokenLayout, device: torch.device) -> Kernel:
    """Attention for the ranks of one host (see ``peer_memory.reachable``), each with its chunk of ``layout``.

    No LSE, no mask and no prefix; any number of heads.
    """
    return one_operation(PeerKeys(attend, axis, layout, device))


class PeerKeys:
    """Attention to the keys of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(self, attend: Attend, axis: Axis, layout: TokenLayout, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        self._rows = tuple(_rows_of(layout, rank) for rank in range(axis.size))
        self._firsts = tuple(itertools.accumulate(map(_number, self._rows), initial=0))
        self._streams = copy_streams(axis, device, to_self=True)

    def __call__(self, q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor) -> Tensor:
        """My queries' result, contiguous."""
        shared, keys_values = self._memory(k_BKGD)
        shared.barrier(channel=0)  # all have read what was sent in the call before
        sent = k_BKGD.contiguous(), v_BKGD.contiguous()
        for rank, stream in self._streams.items():
            with stream.run():
                self._send(sent, keys_values[rank])
        for stream in self._streams.values():
            stream.wait()
        shared.barrier(channel=1)
        return self._attend(q_BLHD, *keys_values[self._axis.index]).contiguous()

    def _send(self, sent: tuple[Tensor, Tensor], target_2BMGD: Tensor) -> None:
        for mine_BKGD, theirs_BMGD in zip(sent, target_2BMGD, strict=True):
            first = self._firsts[self._axis.index]
            for start, stop in self._rows[self._axis.index]:
                copy_heads(theirs_BMGD[:, first : first + stop - start], mine_BKGD[:, start:stop])
                first += stop - start

    def _memory(self, k_BKGD: Tensor) -> tuple[PeerMemory, tuple[Tensor, ...]]:
        """What is shared, and in it each rank's ``keys_values_2BMGD``."""
        batch, _, *head = k_BKGD.shape
        shape = torch.Size((2, batch, self._firsts[-1], *head))
        shared = PeerMemory.open(shape.numel(), k_BKGD, self._axis, use="keys of a module")
        return shared, tuple(view.view(shape) for view in shared.views_W)


def _rows_of(layout: TokenLayout, rank: int) -> Rows:
    """Those of a rank's chunk that are no padding; none where there are fewer tokens than ranks."""
    rows = layout.valid_rows(rank, 1)
    return ((0, layout.chunk_length),) if rows is None else rows


def _number(rows: Rows) -> int:
    return sum(stop - start for start, stop in rows)
