"""Whose threads do a stage's work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.config import ModelConfig
from deployments.observability.logs import request_context, request_id_var
from deployments.stages import vae_decoder
from deployments.stages.common import StageSpec
from deployments.stages.vae_decoder import NUM_ENCODINGS, VaeDecoder
from deployments.stages.workers import Workers
from deployments.studio.interface import Output
from tests.deployments.support.fake_studio import CLIPS

NUM_CALLS = 40
MODEL = ModelConfig(name="m")
SPEC = StageSpec(model=MODEL, stage=MODEL.decoder)


def test_many_callers_share_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of Serve's threads would keep the memory of its decodings."""
    decodings, encodings = set(), set()

    def decode(*_: Any) -> Any:
        decodings.add(threading.get_ident())
        return np.zeros((1, 16, 16, 3), np.uint8)

    def decode_all(*_: Any) -> Any:
        return SimpleNamespace(frames_FHWC=decode(), sound=None)

    def encode(*_: Any, **__: Any) -> bytes:
        encodings.add(threading.get_ident())
        return b""

    monkeypatch.setattr(vae_decoder, "encode_frames", encode)
    checkpoint = SimpleNamespace(decoder=lambda **_: decoder, defaults=CLIPS)
    monkeypatch.setattr(vae_decoder, "load_stage", lambda spec: checkpoint)
    monkeypatch.setattr(vae_decoder, "warm_decoder", lambda *_: decode())
    decoder = SimpleNamespace(decode_all=decode_all, preview=decode)
    stage, latents = VaeDecoder(SPEC), SimpleNamespace(open=lambda: None)
    request = CLIPS.request(model="m", prompt="a")
    with ThreadPoolExecutor(NUM_CALLS) as callers:
        at_once = threading.Barrier(NUM_CALLS)

        def call(number: int) -> None:
            at_once.wait()
            if number % 2:
                stage.preview(latents, request)  # type: ignore[arg-type]
            else:
                stage.decode(latents, request, Output(format="mp4"))  # type: ignore[arg-type]

        list(callers.map(call, range(NUM_CALLS)))
    assert len(decodings) == 1
    assert len(encodings) <= NUM_ENCODINGS


def test_failures_and_request_ids_cross_threads() -> None:
    workers = Workers(1, "test")
    with request_context("r7"):
        assert workers.run(request_id_var.get) == "r7"
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0)
