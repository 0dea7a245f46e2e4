"""Stages pass values between processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from deployments.stages import common
from deployments.stages.common import CHECK_S, LATE_S, SLOW_S, Decoded, WeightStage

DECODED = Decoded(data=b"the file" * 1000, thumbnail=b"small", decode_s=0.5, further=(b"above", b""))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_files_arrive_as_they_were(protocol: int) -> None:
    arrived = pickle.loads(pickle.dumps(DECODED, protocol=protocol))
    assert arrived == DECODED
    assert {type(file) for file in (arrived.data, *arrived.further)} == {bytes}


def test_files_travel_beside_what_is_pickled() -> None:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(DECODED, protocol=5, buffer_callback=buffers.append)
    assert [bytes(buffer) for buffer in buffers] == [DECODED.data, *DECODED.further]
    assert len(pickled) < 500
    assert pickle.loads(pickled, buffers=[memoryview(bytes(buffer)) for buffer in buffers]) == DECODED


async def test_a_health_check_lasts_until_the_next_one_unless_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve waits for the first check before it admits requests."""
    now_s, late_s, slept_s = 0.0, 0.0, list[float]()

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        slept_s.append(delay_s)
        now_s += delay_s + late_s

    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(common, "asyncio", SimpleNamespace(sleep=sleep))
    stage, waits = WeightStage(), []
    stage._weights = Mock()
    for pause_s, delay_s in ((0, 0), (1, 0), (0.2, 0), (2 * LATE_S, 0), (1, 2 * SLOW_S), (0.2, 0), (1, 0)):
        now_s, late_s = now_s + pause_s, delay_s
        await stage.check_health()
        waits.append(bool(slept_s))
        slept_s.clear()
    assert waits == [False, True, True, False, True, False, True]
    assert CHECK_S < LATE_S
    stage._weights.check.side_effect = RuntimeError("asleep for ever")
    with pytest.raises(RuntimeError, match="asleep for ever"):
        await stage.check_health()
    assert not slept_s
