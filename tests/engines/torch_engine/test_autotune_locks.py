"""A gang takes the locks of its hosts while it times steps."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from engines.core.storage import HostLock
from engines.torch_engine import autotune
from engines.torch_engine.autotune import GangLock
from engines.torch_engine.engine import TorchEngine
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support.decisions import STRATEGIES_MS, Times, choosing, start
from tests.support.locks import is_free

NUM_LOOKS = 3


class Others(ExitStack):
    """Holds the locks of the hosts ``names`` until a rank has looked ``NUM_LOOKS`` times."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__()
        self.num_looks = 0
        for name in names:
            with patch("socket.gethostname", lambda name=name: name):
                lock = HostLock(folder)
            self.enter_context(lock.shared())

    def look(self, _: float) -> None:
        self.num_looks += 1
        if self.num_looks == NUM_LOOKS:
            self.close()


def take_locks(folder: Path, hosts: tuple[str, str], patience_s: float = 10.0) -> tuple[int, bool, bool]:
    """Return how often a rank looked while the first host was busy. Return whether its own host was free between two
    looks, and is locked once the gang holds the locks."""
    dist.barrier()
    host = hosts[dist.get_rank()]
    others = Others(folder, *([host] if dist.get_rank() == 0 else []))
    was_free = False

    def look(pause_s: float) -> None:
        nonlocal was_free
        was_free = was_free or (host != hosts[0] and is_free(own))
        dist.barrier()
        others.look(pause_s)

    with (
        patch("socket.gethostname", lambda: host),
        patch.object(autotune, "PATIENCE_S", patience_s),
        patch.object(time, "sleep", look),
    ):
        own = HostLock(folder)
        dist.barrier()
        lock = GangLock(own)
        with lock.held():
            is_taken = not is_free(own)
            dist.barrier()
        others.close()
    return others.num_looks, was_free, is_taken


def test_a_gang_waits_until_no_process_of_its_host_prepares(tmp_path: Path) -> None:
    for num_looks, _, is_taken in gang(2).run(take_locks, tmp_path, ("a", "a")):
        assert (num_looks, is_taken) == (NUM_LOOKS, True)


def test_it_takes_the_locks_of_all_hosts_or_none(tmp_path: Path) -> None:
    """A gang with one lock that waited for another could deadlock with a gang that does the same."""
    first, second = gang(2).run(take_locks, tmp_path, ("a", "b"))
    assert first == (NUM_LOOKS, False, True)
    assert second == (NUM_LOOKS, True, True)


def test_it_waits_no_longer_than_it_has_patience(tmp_path: Path) -> None:
    patience_s = (NUM_LOOKS - 1) * autotune.POLL_S
    for num_looks, _, is_taken in gang(2).run(take_locks, tmp_path, ("a", "a"), patience_s):
        assert (num_looks, is_taken) == (NUM_LOOKS - 1, True), "the others are still there"


def test_without_a_lock_it_waits_for_no_process() -> None:
    with GangLock(None).held():
        pass


class Watched(Times):
    """Checks that the lock is held while a step is timed."""

    lock: HostLock

    def of(self, engine: TorchEngine, branches: tuple[object, ...], ranks: tuple[int, ...]) -> float:
        assert not is_free(self.lock), "a step is timed, and others may prepare"
        return super().of(engine, branches, ranks)


def watched(folder: Path) -> tuple[str, int]:
    lock = Watched.lock = HostLock(folder)
    started = start(replace(choosing(folder), lock=lock), 1, Watched(strategies_ms=STRATEGIES_MS))
    dist.barrier()
    assert dist.get_rank() or is_free(lock), "afterwards they may"
    return started.strategy, started.num_timed


def test_steps_are_timed_while_no_process_prepares(tmp_path: Path) -> None:
    (strategy, num_timed), _ = gang(2).run(watched, tmp_path)
    assert strategy == "allgather_kv2"
    assert num_timed > 0
