"""Before the first request stages warm up what they will run, in its threads, with no lasting effect."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from deployments.model_config import ModelConfig
from deployments.service.interface import Output
from deployments.stages import vae_decoder
from deployments.stages import warm_up as warm_up_module
from deployments.stages.common import StageSpec
from deployments.stages.devices import host_lock
from deployments.stages.stage_config import DenoiserConfig, EncoderConfig
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from deployments.stages.warm_up import PROMPT, warm_decoder, warm_encoder
from engines.core import logs
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.blocks.encoder import BlocksEncoder
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.media.encode import encode_frames
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_whole
from tests.support.locks import is_free

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return the encodings and decodings, their arguments, and their threads."""
    seen: Calls = []

    def watch(owner: Any, name: str, facts: Any) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append((name, *facts(*args), threading.current_thread().name[:8]))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("decode_all", "preview"):
        watch(BlocksDecoder, name, lambda decoder, latents, request: [request.width, request.height])
    watch(vae_decoder, "encode_frames", lambda frames, format: [format])
    watch(BlocksEncoder, "encode", lambda encoder, request, pictures: [len(pictures.pictures), request.width])
    return seen


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the phases whose ends were logged."""
    ended: list[str] = []
    monkeypatch.setattr(logs, "log_phase", lambda phase, took_s, **fields: ended.append(phase))
    return ended


def spec_of(path: Path, *sizes: str) -> StageSpec:
    denoiser = DenoiserConfig(warm_sizes=tuple(map(Size.parse, sizes)))
    model = ModelConfig(name="m", path=str(path), denoiser=denoiser)
    return StageSpec(model=model, stage=model.decoder, metadata="none")


def test_a_decoder_does_each_size_a_preview_and_each_format(pictures: Path, calls: Calls) -> None:
    decoder = VaeDecoder(spec_of(pictures, "64x48", "32x32"))
    formats = [("encode_frames", format, "encoding") for format in ("png", "jpeg", "webp")]
    sizes = [("decode_all", 64, 48, "decoding"), ("decode_all", 32, 32, "decoding"), ("preview", 64, 48, "decoding")]
    assert calls == [*sizes, *formats]
    checkpoint, num_calls = Checkpoint(pictures), len(calls)
    request = checkpoint.defaults.request(Size.parse("64x48"))
    decoder.decode(Parcel.of(checkpoint.first_latents(request)), request, Output(format="png"))
    assert calls[num_calls:] == [sizes[0], formats[0]], "a request does nothing that was not done before"


def test_a_clip_is_decoded_whole_for_those_who_prepare_sizes_and_its_bytes_stay(
    clips: Path, calls: Calls, phases: list[str]
) -> None:
    VaeDecoder(spec_of(clips, "32x32x9"))
    assert [phase for phase in phases if phase.endswith((": weights", "up"))] == [
        "decoder: weights",
        "decoder: warm up",
    ]
    names = [call[0] for call in calls]
    assert names == ["decode_all", "preview", "encode_frames"]
    calls.clear()
    decoder = VaeDecoder(spec_of(clips))
    assert [call[0] for call in calls] == ["preview", "encode_frames"]
    checkpoint = Checkpoint(clips)
    request = checkpoint.defaults.request(seed=3)
    latents = checkpoint.first_latents(request)
    cold = encode_frames(Checkpoint(clips).decoder().decode(latents, request), "mp4", fps=request.fps)
    assert decoder.decode(Parcel.of(latents), request, Output(format="mp4")).data == cold


def test_an_encoder_sees_words_and_pictures(pictures: Path, calls: Calls, phases: list[str]) -> None:
    PromptEncoder(spec_of(pictures, "64x48"))
    assert [phase for phase in phases if phase.endswith((": weights", "up"))] == [
        "encoder: weights",
        "encoder: warm up",
    ]
    assert calls == [("encode", 0, 64, "encoding"), ("encode", 1, 64, "encoding")]
    calls.clear()
    PromptEncoder(spec_of(resolve_path("kontext-shapes"), "96x96"))
    assert calls == [("encode", 1, 96, "encoding")]


def test_nothing_is_decoded_of_what_nobody_knows(pictures: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = copy(Checkpoint(pictures).spec)
    unknown.has_known_conditioning = False
    monkeypatch.setattr("pipelines.checkpoint.spec_of", lambda path: unknown)
    VaeDecoder(spec_of(pictures, "64x48"))
    assert [call[0] for call in calls] == ["encode_frames"] * 3


@pytest.mark.parametrize(("compiles", "num_runs"), [(False, 1), (True, 2)])
def test_what_is_captured_has_been_replayed(pictures: Path, compiles: bool, num_runs: int) -> None:
    prompts: list[str] = []
    spec, checkpoint = spec_of(pictures), Checkpoint(pictures)
    model = spec.model.model_copy(update={"text_encoder": EncoderConfig(compile=compiles)})
    encoder: Any = SimpleNamespace(compile_calls=nullcontext, encode=lambda request, _: prompts.append(request.prompt))
    warm_encoder(encoder, replace(spec, model=model), checkpoint)
    assert prompts == [PROMPT] * 2 * num_runs, "words alone, and words with a picture"


def test_a_decoder_of_a_whole_pipeline_starts_with_nothing_to_warm(tmp_path: Path, calls: Calls) -> None:
    """The rank decodes. Formats are warmed up as for other models."""
    VaeDecoder(spec_of(tiny_whole.pixart_sigma(tmp_path)))
    assert [call[0] for call in calls] == ["encode_frames"] * 3


@pytest.mark.parametrize(("memory_gib", "expected"), [(None, []), (24.0, ["cuda", "cuda"])])
def test_models_on_small_cards_release_what_the_warm_up_needed(
    memory_gib: float | None, expected: list[str], pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(warm_up_module, "release_unused_memory", released.append)
    spec, checkpoint = spec_of(pictures, "64x48"), Checkpoint(pictures)
    model = spec.model.model_copy(update={"memory_gib": memory_gib})
    on_gpu = replace(spec, model=model, stage=replace(spec.stage, num_gpus=0.1))

    def blank(*_: Any) -> Any:
        assert not released or released == ["cuda"], "before the release"
        return np.zeros((1, 8, 8, 3), np.uint8)

    warm_encoder(cast(Any, SimpleNamespace(compile_calls=nullcontext, encode=blank)), on_gpu, checkpoint)
    calls = {"decode_all": blank, "preview": blank, "warm_kernels": blank}
    warm_decoder(cast(Any, SimpleNamespace(compile_calls=nullcontext, **calls)), on_gpu, checkpoint)
    assert released == expected


@pytest.mark.parametrize("num_gpus", [0.0, 0.1])
def test_stages_on_gpus_prepare_while_nobody_times_steps(
    num_gpus: float, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages on CPUs share them with other work anyway."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    was_free: list[bool] = []

    def look(*_: Any) -> Any:
        lock = host_lock(1.0)
        assert lock is not None
        was_free.append(is_free(lock))
        return np.zeros((1, 8, 8, 3), np.uint8)

    spec, checkpoint = spec_of(pictures, "64x48"), Checkpoint(pictures)
    on_gpu = replace(spec, stage=replace(spec.stage, num_gpus=num_gpus))
    warm_encoder(cast(Any, SimpleNamespace(compile_calls=nullcontext, encode=look)), on_gpu, checkpoint)
    decoder: Any = SimpleNamespace(compile_calls=nullcontext, decode_all=look, preview=look, warm_kernels=look)
    warm_decoder(decoder, on_gpu, checkpoint)
    assert len(was_free) == 5
    assert set(was_free) == {not num_gpus}
