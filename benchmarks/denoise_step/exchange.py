"""How fast q, k and v travel between the GPUs of a host, alone and beside attention: NCCL, copy engines by row length.

    torchrun --nproc_per_node 4 -m benchmarks.denoise_step.exchange

Shapes are Wan2.1-14B's at 832x480x81. Gigabytes a second are those that leave one GPU. On a CPU, where ranks share no
memory, copies stay in the process: that is the program's own test. The last line is one JSON document.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.distributed import start_distributed
from benchmarks.timing import measure, rank_synchronize
from engines.fast.interface import SideStream
from engines.parallel.collectives import Axis, all_to_all
from engines.parallel.mesh import Groups
from engines.torch_engine.exchange.heads import local_attention
from engines.torch_engine.exchange.peer_memory import PeerMemory, copy_rows

TOKENS, HEADS, DIM = 32760, 40, 128
SMALL_TOKENS = 240
ATTENDED_HEADS = 5
CALLS = 5
"""In one repeat: then launching them takes no part of the time."""


class Exchanges:
    """Every way to send this rank's queries, keys and values, and what may run meanwhile."""

    def __init__(self, rank: int, world: int) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.length = (TOKENS if on_gpu else SMALL_TOKENS) // world
        ranks = tuple(range(world))
        self.axis = Axis(ranks=ranks, index=rank, group=Groups(world).name(ranks))
        self.qkv = [self.random(self.length, HEADS * DIM) for _ in "qkv"]
        numel = 3 * self.qkv[0].numel()
        self.memory = PeerMemory.open(numel, self.qkv[0], self.axis, use="speed") if on_gpu else None
        views = self.memory.views_W if self.memory else tuple(self.random(numel) for _ in range(world))
        self.inboxes = [view.view(3, world * self.length, -1) for view in views]
        self.streams = {(rank + turn) % world: SideStream(self.device, f"copies {turn}") for turn in range(1, world)}
        self.attended = [self.random(1, world * self.length, ATTENDED_HEADS, DIM) for _ in "qkv"]
        self.attention = local_attention(self.device, self.dtype)
        self.packed = torch.stack(self.qkv).view(world, -1)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def num_bytes(self) -> float:
        """That leave this rank."""
        return self.packed.nbytes * len(self.streams) / self.axis.size

    def nccl(self) -> None:
        all_to_all(self.packed, self.axis)

    def copies(self, heads: int) -> None:
        self.start_copies(heads)
        self.wait()

    def start_copies(self, heads: int) -> None:
        """Rows of so many heads each."""
        columns, each = heads * DIM, HEADS // self.axis.size * DIM
        mine = slice(self.axis.index * self.length, (self.axis.index + 1) * self.length)
        for peer, stream in self.streams.items():
            with stream.run():
                for start in range(0, each, columns):
                    for which, x_LC in enumerate(self.qkv):
                        source_LC = x_LC[:, peer * each + start : peer * each + start + columns]
                        copy_rows(self.inboxes[peer][which, mine, start : start + columns], source_LC)

    def wait(self) -> None:
        for stream in self.streams.values():
            stream.wait()

    def attend(self) -> None:
        self.attention(*self.attended)

    def attend_beside(self, heads: int) -> None:
        self.start_copies(heads)
        self.attend()
        self.wait()


def cases(exchanges: Exchanges) -> dict[str, Callable[[], object]]:
    lengths = [heads for heads in (1, 2, 5, 10) if HEADS // exchanges.axis.size % heads == 0]
    found: dict[str, Callable[[], object]] = {"NCCL (or Gloo)": exchanges.nccl}
    found |= {f"copies, rows of {heads} heads": partial(exchanges.copies, heads) for heads in lengths}
    found |= {f"attention, {ATTENDED_HEADS} heads": exchanges.attend}
    found |= {f"attention beside copies of {heads}": partial(exchanges.attend_beside, heads) for heads in lengths}
    if exchanges.memory is not None:
        found["barrier"] = partial(exchanges.memory.barrier, channel=0)
    return found


def timed(exchanges: Exchanges, name: str, call: Callable[[], object]) -> dict[str, Any]:
    times = measure(lambda: [call() for _ in range(CALLS)], repeats=7)
    each_us = 1000 * times.median_ms / CALLS
    is_exchange = name.startswith(("NCCL", "copies"))
    rate = {"gb_per_s": round(exchanges.num_bytes / each_us / 1e3, 1)} if is_exchange else {}
    return {"case": name, "each_us": round(each_us, 1), **rate}


@torch.no_grad()
def main() -> None:
    rank, world = start_distributed()
    exchanges = Exchanges(rank, world)
    results = []
    for name, call in cases(exchanges).items():
        results.append(timed(exchanges, name, call))
        if rank == 0:
            rate = f"{results[-1]['gb_per_s']} GB/s" if "gb_per_s" in results[-1] else ""
            print(f"{name:32} {results[-1]['each_us']:9.1f} us {rate}", flush=True)
    if rank == 0:
        print(json.dumps({"num_gpus": world, "results": results}), flush=True)
    rank_synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
