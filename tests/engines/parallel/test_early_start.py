"""The thread's results are there and shared, its errors arrive, and every caller waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.resources import rank_resources
from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel import early_start
from engines.parallel.collectives import EXCHANGES, Axis
from engines.parallel.early_start import (
    EarlyStart,
    gang_groups,
    start_early,
    wait_for_early_start,
    wait_for_first_exchanges,
)
from engines.parallel.mesh import Teams
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.support.rank_resources import separate_rank_resources
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")
WORK = "engines.parallel.early_start._warm_up_kernels"
"""The last work of the thread."""
Seen = list[tuple[str, tuple[int, ...]]]


@contextmanager
def as_at_start() -> Iterator[None]:
    """Hide what earlier tests have left in this process."""
    with separate_rank_resources():
        yield


def test_every_exchange_ran_once_on_every_team_of_a_rank() -> None:
    for rank, seen in enumerate(gang(4).run(exchanges_seen)):
        pair = (0, 1) if rank < 2 else (2, 3)
        assert seen == [(kind, ranks) for ranks in (pair, (0, 1, 2, 3)) for kind in EXCHANGES]


def exchanges_seen() -> Seen:
    seen: Seen = []

    def watched(kind: str) -> Callable[[Tensor, Axis], Tensor]:
        def exchange(x: Tensor, axis: Axis) -> Tensor:
            assert axis.ranks[axis.index] == dist.get_rank()
            assert threading.current_thread() is not threading.main_thread()
            seen.append((kind, axis.ranks))
            return EXCHANGES[kind](x, axis)

        return exchange

    with as_at_start(), patch.object(early_start, "EXCHANGES", {kind: watched(kind) for kind in EXCHANGES}):
        start_early(CPU)
        seconds = wait_for_early_start()
    assert list(seconds) == ["groups", "first exchanges of 2", "first exchanges of 4", "first kernels"]
    assert min(seconds.values()) > 0
    return seen


def test_teams_find_the_groups_that_were_made_early() -> None:
    assert gang(4).run(teams_without_new_groups) == [True] * 4


def teams_without_new_groups() -> bool:
    with as_at_start():
        start_early(CPU)
        groups = gang_groups()
        specs = [ParallelSpec(ulysses=num_ranks) for num_ranks in (1, 2, 4)]
        with patch("engines.parallel.mesh.new_group", side_effect=AssertionError("made again")):
            teams = Teams(rank=dist.get_rank(), num_ranks=4, specs=specs, groups=groups)
        names = {team.ranks: team.ulysses.group for team in teams.all() if len(team.ranks) > 1}
        return gang_groups() is groups and len(set(names.values())) == 2


def test_an_engine_waits_and_gives_the_right_answer() -> None:
    branches = models.branches("flux", "uneven")
    (expected,) = TorchEngine(models.model("flux")).predict(branches, (0,))
    for was_over, answer in gang(2).run(predict_after_early_start):
        assert was_over
        assert relative_difference(answer, expected) <= 1e-5


def predict_after_early_start() -> tuple[bool, Tensor]:
    """Return whether the early start was over when the engine was made, though it takes longer, and the answer."""
    branches, model = models.branches("flux", "uneven"), models.model("flux")
    over: list[torch.device] = []

    def work(device: torch.device) -> None:
        time.sleep(1.0)
        over.append(device)

    with as_at_start(), patch(WORK, work):
        start_early(CPU)
        with closing(TorchEngine(model, strategy="ulysses")) as engine:  # other tests have no use for its kernels
            return bool(over), engine.predict(branches, (0, 1))[0]


def test_groups_go_with_their_process_group(tmp_path: Path) -> None:
    made = []
    with as_at_start():
        for number in range(2):
            store = dist.FileStore(str(tmp_path / str(number)), 1)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            made.append(gang_groups())
            assert gang_groups() is made[-1]
            dist.destroy_process_group()
    assert made[0] is not made[1]


def test_what_the_thread_raised_is_raised_where_it_is_waited_for() -> None:
    def unreachable(_: torch.device) -> None:
        raise ConnectionError("rank 1 is unreachable")

    with as_at_start(), patch(WORK, unreachable):
        start_early(CPU)
        with pytest.raises(ConnectionError, match="rank 1 is unreachable") as raised:
            gang_groups()
        assert raised.traceback[-1].name == "unreachable"
        with pytest.raises(ConnectionError):  # it is raised at every later wait, too
            wait_for_early_start()


def test_first_exchanges_are_over_before_the_first_kernels_begin() -> None:
    assert gang(2).run(exchanges_before_kernels) == [["first exchanges of 2"]] * 2


def exchanges_before_kernels() -> list[str]:
    """Return the parts that are over when weights may be loaded, while the first kernels wait."""
    released = threading.Event()
    with as_at_start(), patch(WORK, lambda _: released.wait()):
        start_early(CPU)
        wait_for_first_exchanges()
        over = [part for part in rank_resources().get(EarlyStart).seconds if part != "groups"]
        released.set()
        assert "first kernels" in wait_for_early_start()
    return over


def test_a_failed_exchange_is_raised_where_weights_would_be_loaded() -> None:
    def unreachable(*_: object) -> None:
        raise ConnectionError("rank 1 is unreachable")

    is_member = patch("torch.distributed.is_initialized", return_value=True)
    with as_at_start(), is_member, patch.object(early_start, "_warm_up_exchanges", unreachable):
        start_early(CPU)
        for wait in (wait_for_first_exchanges, wait_for_early_start):
            with pytest.raises(ConnectionError, match="rank 1 is unreachable"):
                wait()


def test_without_an_early_start_there_is_nothing_to_wait_for() -> None:
    with as_at_start():
        wait_for_first_exchanges()
        assert wait_for_early_start() == {}
        assert gang_groups().name((0,)) == ""


def test_a_process_ends_though_its_early_start_hangs() -> None:
    released = threading.Event()
    with as_at_start(), patch(WORK, lambda _: released.wait()):
        start_early(CPU)
        (thread,) = (each for each in threading.enumerate() if each.name == "early start")
        assert thread.daemon
        with pytest.raises(AssertionError, match="under way"):
            start_early(CPU)
        released.set()
        wait_for_early_start()


IMPORTS = """
import sys, torch, torch.distributed as dist
from engines.parallel.early_start import start_early, wait_for_early_start
heavy = {"torch._dynamo", "torch._inductor", "sympy", "diffusers", "transformers"} & set(sys.modules)
assert not heavy, heavy
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
before, seed = set(sys.modules), torch.get_rng_state()
start_early(torch.device("cpu"))
wait_for_early_start()
print(*set(sys.modules) - before, "random" * (not torch.equal(seed, torch.get_rng_state())))
"""


def test_the_thread_imports_nothing_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    told = [rank.communicate(timeout=PATIENCE_S)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told == ["", ""]
