"""Steps are timed while nobody of the hosts prepares, and nobody waits for ever."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engines.core.storage.host_turns import HostTurns
from engines.torch_engine import quiet
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.quiet import Quiet
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support.decisions import Times, choosing, start
from tests.support.turns import could_be_alone

NUM_LOOKS = 3
CPU = torch.device("cpu")


class Others(ExitStack):
    """A process that prepares on the hosts named ``names``, until a rank has looked so often whether it still does."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__()
        self.num_looks = 0
        for name in names:
            with patch("socket.gethostname", lambda name=name: name):
                turns = HostTurns(folder)
            self.enter_context(turns.beside_others())

    def look(self, _: float) -> None:
        self.num_looks += 1
        if self.num_looks == NUM_LOOKS:
            self.close()


def looked(folder: Path, hosts: tuple[str, str], busy: tuple[str, ...], patience_s: float) -> tuple[int, bool, bool]:
    """How often a rank looked, whether its host was free between two looks, and is taken once the gang is alone."""
    dist.barrier()
    host = hosts[dist.get_rank()]
    others = Others(folder, *(name for name in busy if dist.get_rank() == hosts.index(name)))
    was_free = False

    def look(pause_s: float) -> None:
        nonlocal was_free
        was_free = was_free or (host not in busy and could_be_alone(turns))
        dist.barrier()
        others.look(pause_s)

    with (
        patch("socket.gethostname", lambda: host),
        patch.object(quiet, "PATIENCE_S", patience_s),
        patch.object(time, "sleep", look),
    ):
        turns = HostTurns(folder)
        dist.barrier()
        alone = Quiet(turns, CPU)
        with alone.alone():
            is_taken = not could_be_alone(turns)
            dist.barrier()
        others.close()
    return others.num_looks, was_free, is_taken


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_a_gang_waits_until_nobody_prepares(hosts: tuple[str, str], tmp_path: Path) -> None:
    for num_looks, _, is_taken in gang(2).run(looked, tmp_path, hosts, ("a",), 10.0):
        assert (num_looks, is_taken) == (NUM_LOOKS, True)


def test_it_takes_all_hosts_or_none(tmp_path: Path) -> None:
    """Who held one and waited for another might wait for a gang that does the same."""
    _, (_, was_free, is_taken) = gang(2).run(looked, tmp_path, ("a", "b"), ("a",), 10.0)
    assert (was_free, is_taken) == (True, True)


def test_it_waits_no_longer_than_it_has_patience(tmp_path: Path) -> None:
    patience_s = (NUM_LOOKS - 1) * quiet.POLL_S
    for num_looks, _, is_taken in gang(2).run(looked, tmp_path, ("a", "a"), ("a",), patience_s):
        assert (num_looks, is_taken) == (NUM_LOOKS - 1, True), "the others are still there"


def test_who_has_no_turns_waits_for_nobody() -> None:
    with Quiet(None, CPU).alone():
        pass


class Watched(Times):
    """Sees whether others may prepare while a step is timed."""

    turns: HostTurns

    def of(self, engine: TorchEngine, branches: tuple[object, ...], ranks: tuple[int, ...]) -> float:
        assert not could_be_alone(self.turns), "a step is timed, and others may prepare"
        return super().of(engine, branches, ranks)


def decided(folder: Path) -> tuple[str, int]:
    turns = Watched.turns = HostTurns(folder)
    times = Watched(strategies_ms={"ring2": 71.4, "allgather_kv2": 61.6, "ulysses2": 61.6})
    started = start(replace(choosing(folder), turns=turns), 1, times)
    dist.barrier()
    assert dist.get_rank() or could_be_alone(turns), "afterwards they may"
    return started.strategy, started.num_timed


def test_what_auto_means_is_decided_while_nobody_prepares(tmp_path: Path) -> None:
    (strategy, num_timed), _ = gang(2).run(decided, tmp_path)
    assert strategy == "allgather_kv2"
    assert num_timed > 0
