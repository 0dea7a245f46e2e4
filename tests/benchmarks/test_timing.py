"""What is said of repeated calls."""

from __future__ import annotations

import pytest

from benchmarks.timing import Times


@pytest.mark.parametrize(("num", "p90_ms"), [(1, 1.0), (2, 2.0), (3, 3.0), (5, 5.0), (10, 9.0), (20, 18.0), (21, 19.0)])
def test_nine_in_ten_take_no_longer(num: int, p90_ms: float) -> None:
    values_ms = [float(number) for number in range(num, 0, -1)]
    times = Times.of(values_ms)
    assert (times.lowest_ms, times.p90_ms, times.num_repeats) == (1.0, p90_ms, num)
    assert times.lowest_ms <= times.median_ms <= times.p90_ms
