"""Machines by published figures predict the times measured on real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.planner.cost_model import Workload
from engines.planner.forecast import forecast
from engines.planner.machine import H200, MACHINES, PUBLISHED
from engines.planner.profile import ModelProfile
from tests.engines.planner.test_cost_model import flux

__all__ = ["flux"]

TEXT = 512


def work(side: int) -> Workload:
    return Workload(lengths=(("text", TEXT), ("image", (side // 16) ** 2)))


@pytest.mark.parametrize(
    ("num_ranks", "side", "precision", "measured_ms"),
    [
        (1, 1024, "native", 119.7),
        (2, 1024, "native", 67.3),
        (4, 1024, "native", 35.3),
        (4, 2048, "native", 175),
        (4, 512, "native", 13.3),
        (1, 1024, "fp8", 83.5),
        (4, 1024, "fp8", 26.1),
    ],
)
def test_h100s_take_what_was_measured(
    flux: ModelProfile, num_ranks: int, side: int, precision: str, measured_ms: float
) -> None:
    """FLUX.1-dev is within a fifth: benchmarks/reports/quad_h100_2026-11-26.md."""
    step = forecast(flux, work(side), num_ranks, MACHINES["h100"], precision)
    assert step.chosen.total_ms == pytest.approx(measured_ms, rel=0.2)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("num_ranks", [1, 3, 6, 8])
def test_any_number_of_ranks_is_known(flux: ModelProfile, name: str, num_ranks: int) -> None:
    machine = MACHINES[name].for_ranks(num_ranks)
    step = forecast(flux, work(1024), num_ranks, machine, must_fit=False)
    assert all(cost.spec.num_ranks == num_ranks for cost in step.costs)
    assert "published, not measured" in step.table()
    assert f"published in: {machine.source}" in machine.describe()


def test_what_was_measured_stays() -> None:
    assert H200.for_ranks(4) == H200
    assert H200.for_ranks(8).exchanges.items() > H200.exchanges.items()


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "all_reduce", "rotation"])
def test_exchanges_over_four_follow_from_those_over_two(kind: str) -> None:
    """They are within a third of the measured ones."""
    two = replace(H200, exchanges={key: line for key, line in H200.exchanges.items() if key.endswith("/2")})
    followed, measured = (one.exchanges[f"{kind}/4"].bytes_per_s for one in (two.for_ranks(4), H200))
    assert followed == pytest.approx(measured, rel=0.34)


def test_without_nvlink_exchanges_decide() -> None:
    fast, slow = (MACHINES[name].exchange_s("all_to_all", 4, 2**28) for name in ("h100", "h100-pcie"))
    assert slow > 5 * fast


@pytest.mark.parametrize("name", ["a100", "rtx-3090"])
def test_gpus_before_ada_have_no_float8(flux: ModelProfile, name: str) -> None:
    with pytest.raises(ValueError, match=r"no rate in precision fp8 is known of .*; known: native, int8"):
        forecast(flux, work(1024), 1, MACHINES[name], "fp8", must_fit=False)


def test_where_nothing_fits_the_smallest_is_chosen_and_said_to_be(flux: ModelProfile) -> None:
    small = replace(H200, memory_bytes=2**30)
    step = forecast(flux, work(1024), 4, small, must_fit=False)
    assert step.chosen.memory_bytes == min(cost.memory_bytes for cost in step.costs)
    assert step.reason() == f"{step.chosen.spec.name}: the smallest of {len(step.costs)}, none of which fits"
