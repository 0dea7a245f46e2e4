"""Encoders and decoders may be called from several threads at once, as by Serve."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.requests.handle import handle_request
from deployments.service.interface import Output
from deployments.stages.common import StageSpec, load_stage
from deployments.stages.stage_config import EncoderConfig
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.parcel import Parcel
from pipelines.checkpoint import Checkpoint
from pipelines.media.encode import encode_frames
from pipelines.media.sound import Sound
from pipelines.request import InputSound, MediaRequest
from tests.deployments.support.live import config_of

NUM_CALLS = 120
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
PROMPTS = ("a", "a red circle", "a small blue square at the top")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads interfere with each other as often as possible
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool
    sys.setswitchinterval(interval_s)


def spec_of(path: Path, **encoder: Any) -> StageSpec:
    model = ModelConfig(name="m", path=str(path), text_encoder=EncoderConfig(**encoder))
    return StageSpec(model=model, stage=model.text_encoder, metadata="none")


def request_of(path: Path, prompt: str) -> MediaRequest:
    return handle_request(make_cards(config_of({"m": path}).app), "id", {"prompt": prompt})[0]


@pytest.mark.parametrize("kind", ["pictures", "clips"])
def test_prompts_encoded_at_the_same_time_do_not_mix(
    kind: str, request: pytest.FixtureRequest, threads: ThreadPoolExecutor
) -> None:
    path: Path = request.getfixturevalue(kind)
    encoder = PromptEncoder(spec_of(path, conditionings_mib=0))
    requests = [request_of(path, PROMPTS[i % len(PROMPTS)]) for i in range(NUM_CALLS)]
    alone = [encoder.encode_valid(one).open() for one in requests[: len(PROMPTS)]]
    together = [encoded.open() for encoded in threads.map(encoder.encode_valid, requests)]
    for i, conditioning in enumerate(together):
        assert tensors(conditioning)
        torch.testing.assert_close(tensors(conditioning), tensors(alone[i % len(PROMPTS)]), rtol=0, atol=0)


def tensors(record: Any) -> list[torch.Tensor]:
    """Return all tensors of a record, and of the records and dicts in it."""
    if isinstance(record, torch.Tensor):
        return [record]
    if is_dataclass(record):
        return [tensor for field in fields(record) for tensor in tensors(getattr(record, field.name))]
    return [tensor for value in record.values() for tensor in tensors(value)] if isinstance(record, dict) else []


def test_the_log_names_the_parts_of_a_start(pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(pictures)
    PromptEncoder(spec)
    encoder = phases(capfd)
    VaeDecoder(spec)
    decoder = phases(capfd)
    for stage, found, own in (("encoder", encoder, "load: text_encoder"), ("decoder", decoder, "load: vae")):
        parts = {f"{stage}: checkpoint", f"{stage}: device", "load: blocks", own}
        assert parts <= found.keys()
        assert sum(found[part] for part in parts) <= found[f"{stage}: weights"] + 0.001 * len(parts)  # each is rounded
    assert "load: text_encoder" not in decoder


def phases(capfd: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the seconds of the phases logged since the last call."""
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    return {line["phase"]: line["took_s"] for line in lines if "phase" in line}


def test_clips_decoded_at_the_same_time_do_not_mix(clips: Path, threads: ThreadPoolExecutor) -> None:
    decoder, request = VaeDecoder(spec_of(clips)), request_of(clips, "a")
    sampler = Checkpoint(clips).sampler()
    encoder = PromptEncoder(spec_of(clips))
    state = sampler.begin(request, encoder.encode_valid(request).open())
    latents = sampler.latents(state)
    parcels = [Parcel.of({**latents, "latents": scale * latents["latents"]}) for scale in (0.5, 1.0, 1.5)]

    def decode(i: int) -> bytes:
        return decoder.decode(parcels[i % len(parcels)], request, Output(format="mp4")).data

    alone = [decode(i) for i in range(len(parcels))]
    assert len(set(alone)) == len(parcels)
    frames_FHWC = Checkpoint(clips).decoder().decode(latents, request)
    assert alone[1] == encode_frames(frames_FHWC, "mp4", fps=request.fps)
    samples_CT = (np.sin(np.arange(48_000))[None] / 2).astype(np.float32)
    copied = InputSound(num_channels=1, rate=48_000, data=samples_CT.tobytes())
    heard = decoder.decode(parcels[1], request, Output(format="mp4", sound=copied)).data
    cut = Sound(samples_CT=samples_CT[:, : round(request.num_frames / request.fps * 48_000)], rate=48_000)
    assert heard == encode_frames(frames_FHWC, "mp4", fps=request.fps, sound=cut)
    assert list(threads.map(decode, range(12))) == [alone[i % len(parcels)] for i in range(12)]


@pytest.mark.parametrize(("gives_way", "expected"), [(False, None), (True, "1")])
def test_stages_give_way_to_ranks_if_they_are_told_to(
    pictures: Path, gives_way: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRIORITY, "")
    monkeypatch.delenv(PRIORITY)
    load_stage(spec_of(pictures, gives_way=gives_way))
    assert os.environ.get(PRIORITY) == expected
