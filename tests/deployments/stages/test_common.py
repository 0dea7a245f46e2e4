"""Stages pass values between processes."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.observability.logs import configure_logs
from deployments.service.interface import Output
from deployments.stages import common
from deployments.stages.common import CHECK_S, LATE_S, SLOW_S, Decoded, WeightStage, Workers
from deployments.stages.denoiser import Denoiser
from deployments.stages.text_encoder import ConditioningCache, PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.field_error import FieldError
from pipelines.request import Lora
from tests.deployments.support.fake_service import PICTURES

REQUEST = PICTURES.request(prompt="a", request_id="req_1")
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


class WrongEncoder(PromptEncoder):
    def __init__(self, fails: Callable[..., Any]) -> None:
        self._encoder: Any = SimpleNamespace(encode=fails)
        self._weights: Any = SimpleNamespace(work=nullcontext, close=lambda: None)
        self._encoding, self._cache = Workers(1, "encoding"), ConditioningCache(0)


class WrongDecoder(VaeDecoder):
    def __init__(self, fails: Callable[..., Any]) -> None:
        self._decoder: Any = SimpleNamespace(check_fits=fails)


class WrongGang(Denoiser):
    def __init__(self, fails: Callable[..., Any]) -> None:  # Serve awaits that of the class
        async def load_addition(_: Lora) -> int:
            return fails()  # type: ignore[no-any-return]

        self._gang: Any = SimpleNamespace(load_addition=load_addition)

    def __del__(self) -> None: ...  # type: ignore[override]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logs(stream)
    yield stream
    configure_logs()


CALLS: dict[str, tuple[Callable[[Callable[..., Any]], object], dict[str, str]]] = {
    "encode": (lambda fails: WrongEncoder(fails).encode(REQUEST), {"request_id": "req_1"}),
    "expected_s": (
        lambda fails: WrongDecoder(fails).expected_s(REQUEST, Output(format="png")),
        {"request_id": "req_1"},
    ),
    "load_lora": (lambda fails: asyncio.run(WrongGang(fails).load_lora(Lora(name="ink"))), {"lora": "ink"}),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_wrong_request_is_answered_and_logged_without_a_traceback(method: str, log: io.StringIO) -> None:
    """Serve logs the traceback of what a replica raises."""
    call, fields = CALLS[method]
    answer = pickle.loads(pickle.dumps(call(Mock(side_effect=FieldError("it has 900 tokens", "prompt")))))
    assert (type(answer), str(answer), answer.field) == (FieldError, "it has 900 tokens", "prompt")
    event = json.loads(log.getvalue())
    assert event | fields == event
    assert (event["level"], event["reason"], event.get("exception")) == ("info", "it has 900 tokens", None)
    for own in (RuntimeError("a defect"), UnicodeDecodeError("utf-8", b"", 0, 1, "a defect")):
        with pytest.raises(type(own)) as raised:
            call(Mock(side_effect=own))
        assert raised.value is own, "with its own traceback, for Serve's log"
