"""A stage's work runs in few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.model_config import ModelConfig
from deployments.observability.logs import request_context, request_id_var
from deployments.service.interface import Output
from deployments.stages import vae_decoder
from deployments.stages.common import StageSpec, Workers
from deployments.stages.vae_decoder import NUM_ENCODINGS, VaeDecoder
from pipelines.media import clip
from pipelines.media.encode import MAX_GROUPS
from tests.deployments.support.fake_service import CLIPS

NUM_CALLS = 40
MODEL = ModelConfig(name="m")
SPEC = StageSpec(model=MODEL, stage=MODEL.decoder)


def test_many_callers_share_few_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise each of Serve's threads would hold the memory of its decodings."""
    decodings, encodings, groups = set[int](), set[int](), set[int]()

    def decode(*_: Any) -> Any:
        decodings.add(threading.get_ident())
        return np.zeros((1, 16, 16, 3), np.uint8)

    def decode_chunks(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(frames_FHWC=decode(), sound=None)

    def encode(*_: Any, **__: Any) -> bytes:
        encodings.add(threading.get_ident())
        return b""

    monkeypatch.setattr(vae_decoder, "encode_frames", encode)
    monkeypatch.setattr(vae_decoder, "encode_thumbnail", partial(record_thread, groups, lambda _: b""))
    monkeypatch.setattr(clip, "encode_group", partial(record_thread, groups, clip.encode_group))
    (tmp_path / "model_index.json").write_text("{}")
    decoder = SimpleNamespace(decode_chunks=decode_chunks, decode=decode, preview=decode, modules=())
    checkpoint = SimpleNamespace(decoder=lambda **_: decoder, defaults=CLIPS, path=tmp_path)
    monkeypatch.setattr(vae_decoder, "load_stage", lambda spec: checkpoint)
    monkeypatch.setattr(vae_decoder, "warm_decoder", lambda *_: decode())
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
    assert len(groups) <= MAX_GROUPS


def record_thread(threads: set[int], work: Callable[..., Any], *args: Any) -> Any:
    threads.add(threading.get_ident())
    return work(*args)


def test_failures_and_request_ids_cross_threads() -> None:
    workers = Workers(1, "test")
    with request_context("r7"):
        assert workers.run(request_id_var.get) == "r7"
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0)
