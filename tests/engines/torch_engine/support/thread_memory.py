"""Memory that ranks share where they are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engines.parallel.collectives import Axis
from tests.engines.torch_engine.support.teams import WORLD
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")


class ThreadMemory:
    """Stands for ``PeerMemory`` where ranks are threads of one process."""

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
