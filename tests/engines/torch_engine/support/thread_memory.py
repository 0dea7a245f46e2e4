"""Memory that ranks share as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engines.fast.interface import SideStream
from engines.parallel.collectives import Axis
from engines.torch_engine.exchange import peer_attention
from engines.torch_engine.exchange.peer_memory import copy_heads
from tests.engines.torch_engine.support.teams import WORLD
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")


class ThreadMemory:
    """Stands for ``PeerMemory``; the ranks are threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[tuple[str, int], threading.Barrier] = {}
        self._memories: dict[tuple[str, int], list[Tensor]] = {}

    def open(self, numel: int, sample: Tensor, axis: Axis, *, use: str) -> Any:
        with self._lock:
            fresh = [sample.new_full((numel,), float("nan")) for _ in axis.ranks]
            views = self._memories.setdefault((use, numel), fresh)

        def barrier(channel: int) -> None:
            with self._lock:
                meeting = self._barriers.setdefault((use, channel), threading.Barrier(axis.size))
            meeting.wait(timeout=PATIENCE_S)

        return SimpleNamespace(local=views[axis.index], views_W=tuple(views), barrier=barrier)


def on_all_ranks(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(function, range(WORLD)))


@contextmanager
def copies_end_at_waits() -> Iterator[list[bool]]:
    """Yield whether each copied tensor was alive at its rank's next wait for a side stream.

    Until then copy engines may read it, and the memory of a dropped tensor belongs to the next one.
    """
    running, were_alive = threading.local(), list[bool]()
    weak: Any = StorageWeakRef

    def copy(target_BLHD: Tensor, source_BLHD: Tensor) -> None:
        copy_heads(target_BLHD, source_BLHD)
        running.__dict__.setdefault("sources", []).append(weak(source_BLHD.untyped_storage()))

    def wait(_: SideStream) -> None:
        were_alive.extend(not source.expired() for source in running.__dict__.pop("sources", []))

    with patch.object(peer_attention, "copy_heads", copy), patch.object(SideStream, "wait", wait):
        yield were_alive
