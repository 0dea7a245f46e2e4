"""Measuring gives plausible numbers for every exchange and team size, the same on all ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engines.core.spec import ParallelSpec
from engines.parallel.collectives import EXCHANGES, Axis
from engines.parallel.mesh import Groups, Teams
from engines.planner import measure as measuring
from engines.planner.machine import Machine
from engines.planner.measure import measure, measure_here
from engines.planner.profile import profile
from tests.engines.support import models
from tests.engines.support.gloo import gang


def check(machine: Machine, team_sizes: tuple[int, ...]) -> None:
    assert set(machine.exchanges) == {f"{kind}/{num_ranks}" for kind in EXCHANGES for num_ranks in team_sizes}
    for line in machine.exchanges.values():
        assert 1e-6 < line.time_s(2**16) < 10
    for _, rate in (*machine.products, *machine.attention):
        assert 1e6 < rate < 1e16


def test_in_a_gang() -> None:
    machines = gang(4).run(measure_in_gang)
    check(machines[0], (2, 4))
    assert all(machine == machines[0] for machine in machines)


def measure_in_gang() -> Machine:
    specs = [ParallelSpec(ulysses=2), ParallelSpec(ulysses=4)]
    teams = Teams(rank=dist.get_rank(), num_ranks=4, specs=specs, groups=Groups.of_gang())
    return measure(profile(models.model("wan")), teams, torch.device("cpu"))


def sizes_of(slow_s: float) -> set[int]:
    """Return the sizes that a rank exchanges. Exchanges take 1 s on rank 0 and 2 s on rank 1."""
    sizes, rank = set[int](), dist.get_rank()

    def exchange_s(exchange: Any, size_bytes: int, axis: Axis, device: torch.device) -> float:
        sizes.add(size_bytes)
        return 1.0 + rank

    teams = Teams(rank=rank, num_ranks=2, specs=[ParallelSpec(ulysses=2)], groups=Groups.of_gang())
    with (
        patch.dict(measuring.SIZES, cpu=(16, 32, 64)),
        patch.object(measuring, "_exchange_s", exchange_s),
        patch.object(measuring, "SLOW_EXCHANGE_S", slow_s),
    ):
        measuring._exchange_lines(teams, torch.device("cpu"))
    return sizes


def test_over_a_slow_network_no_rank_exchanges_the_largest_size() -> None:
    assert gang(2).run(sizes_of, 1.5) == [{16, 32}] * 2, "the slowest rank decides"
    assert gang(2).run(sizes_of, 2.5) == [{16, 32, 64}] * 2


def test_without_a_gang() -> None:
    check(measure_here(profile(models.model("wan")), 2, "cpu"), (2,))


def test_not_so_many_devices() -> None:
    with pytest.raises(ValueError, match="99 ranks need 99 GPUs, and this host has"):
        measure_here(profile(models.model("wan")), 99, "cuda")
