"""Times of repeated calls."""

from __future__ import annotations

import pytest

from benchmarks import timing
from benchmarks.timing import Times, measure


@pytest.mark.parametrize(("num", "p90_ms"), [(1, 1.0), (2, 2.0), (3, 3.0), (5, 5.0), (10, 9.0), (20, 18.0), (21, 19.0)])
def test_nine_in_ten_take_no_longer(num: int, p90_ms: float) -> None:
    values_ms = [float(number) for number in range(num, 0, -1)]
    times = Times.of(values_ms)
    assert (times.lowest_ms, times.p90_ms, times.num_repeats) == (1.0, p90_ms, num)
    assert times.lowest_ms <= times.median_ms <= times.p90_ms


@pytest.mark.parametrize(
    ("heat_s", "slowest_s", "num_calls"),
    [(0.0, 0.5, 2 + 3), (5.0, 0.5, 2 + 10 + 3), (5.0, 2.0, 2 + 3 + 3), (1.0, 4.0, 2 + 1 + 3)],
)
def test_all_ranks_work_as_long_before_they_are_timed(
    heat_s: float, slowest_s: float, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's call takes ``slowest_s``, this one's almost none: it makes as many calls as the other."""
    calls: list[None] = []
    monkeypatch.setattr(timing, "_of_all_ranks", lambda values: [values, [slowest_s] * len(values)])
    measure(lambda: calls.append(None), repeats=3, warm_up=2, heat_s=heat_s)
    assert len(calls) == num_calls
