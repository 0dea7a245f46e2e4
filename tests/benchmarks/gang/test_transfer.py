"""The benchmark times the state that it says, on every rank."""

from __future__ import annotations

from benchmarks.gang.transfer import TEXT_CHANNELS, TEXT_TOKENS, transfer_times
from tests.engines.support.gloo import gang


def test_a_state_is_handed_over_as_often_as_asked_for() -> None:
    for num_bytes, bare, whole in gang(2).run(transfer_times, 64, 3):
        assert num_bytes == 2 * (16 * 64 + TEXT_TOKENS * TEXT_CHANNELS)
        for times in (bare, whole):
            assert 0 < times.lowest_ms <= times.median_ms
            assert times.num_repeats == 3
