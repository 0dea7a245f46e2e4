"""AllGather-KV for modules that run as they are: copy engines bring every rank the keys and values of all.

Queries and results stay where they are. Keys go from where the projections left them to where attention reads them,
rows that only fill up a rank's tokens left out. With grouped heads that is little: of W ranks each receives
2 G x (W - 1) / W of a token's heads for every token, where Ulysses has 2 (G + H) x (W - 1) / W for every W-th.

Dims: B batch, L my queries, K my keys, M all keys; H and G heads of queries and of keys, D head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.core.kernel import Kernel
from engines.core.layout import Rows, TokenLayout
from engines.parallel.communication.collectives import Axis
from engines.torch_engine.exchange.copy_rows import copy_rows, copy_streams
from engines.torch_engine.exchange.heads import Attend
from engines.torch_engine.exchange.peer_memory import PeerMemory
from engines.torch_engine.exchange.peer_operation import one_operation


def peer_allgather_kv(attend: Attend, axis: Axis, layout: TokenLayout, device: torch.device) -> Kernel:
    """Attention for the ranks of one host (see ``peer_memory.reachable``), each with its chunk of ``layout``.

    No LSE, no mask and no prefix; any number of heads.
    """
    return one_operation(PeerKeys(attend, axis, layout, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """What one shape needs. ``keys_values`` are each rank's (2, B, M, G x D)."""

    shared: PeerMemory
    keys_values: tuple[Tensor, ...]


class PeerKeys:
    """Attention to the keys of all ranks. Memory is made at a shape's first (uncaptured) call."""

    def __init__(self, attend: Attend, axis: Axis, layout: TokenLayout, device: torch.device) -> None:
        self._attend, self._axis = attend, axis
        self._rows = tuple(_rows_of(layout, rank) for rank in range(axis.size))
        self._firsts = tuple(itertools.accumulate(map(_number, self._rows), initial=0))
        self._streams = copy_streams(axis, device, to_self=True)
        self._memories: dict[torch.Size, _Memory] = {}

    def __call__(self, q_BLHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor) -> Tensor:
        """My queries' result, contiguous."""
        memory = self._memory(k_BKGD)
        memory.shared.barrier(channel=0)  # all have read what was sent in the call before
        sent = k_BKGD.flatten(2), v_BKGD.flatten(2)
        for rank, stream in self._streams.items():
            with stream.run():
                self._send(sent, memory.keys_values[rank])
        for stream in self._streams.values():
            stream.wait()
        memory.shared.barrier(channel=1)
        k_BMGD, v_BMGD = torch.unflatten(memory.keys_values[self._axis.index], 3, k_BKGD.shape[2:])
        return self._attend(q_BLHD, k_BMGD, v_BMGD).contiguous()

    def _send(self, sent: tuple[Tensor, Tensor], target_2BMC: Tensor) -> None:
        for (mine_BKC, theirs_BMC), batch in itertools.product(
            zip(sent, target_2BMC, strict=True), range(len(sent[0]))
        ):
            first = self._firsts[self._axis.index]
            for start, stop in self._rows[self._axis.index]:
                copy_rows(theirs_BMC[batch, first : first + stop - start], mine_BKC[batch, start:stop])
                first += stop - start

    def _memory(self, k_BKGD: Tensor) -> _Memory:
        if k_BKGD.shape not in self._memories:
            batch, _, heads, dim = k_BKGD.shape
            shape = (2, batch, self._firsts[-1], heads * dim)
            shared = PeerMemory.open(torch.Size(shape).numel(), k_BKGD, self._axis, use="keys of a module")
            self._memories[k_BKGD.shape] = _Memory(
                shared=shared, keys_values=tuple(view.view(shape) for view in shared.views_W)
            )
        return self._memories[k_BKGD.shape]


def _rows_of(layout: TokenLayout, rank: int) -> Rows:
    """Those of a rank's chunk that are no padding; none where there are fewer tokens than ranks."""
    rows = layout.valid_rows(rank, 1)
    return ((0, layout.chunk_length),) if rows is None else rows


def _number(rows: Rows) -> int:
    return sum(stop - start for start, stop in rows)
