"""A decoder on several devices chooses them, and makes the same pictures and clips."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import ray
import torch
from numpy.typing import NDArray
from PIL import Image

from deployments.app import _bind_stage
from deployments.cli.preflight import num_gpus_needed, problems
from deployments.model_config import ModelConfig
from deployments.service.interface import Output
from deployments.stages.common import StageSpec
from deployments.stages.devices import ALL_GPUS, VISIBLE, own_gpu, stage_devices
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.parcel import Parcel
from pipelines.checkpoint import Checkpoint
from pipelines.vae import chunks, multi_gpu
from tests.deployments.cli.test_preflight import with_model


def spec_of(path: str | Path, **decoder: Any) -> StageSpec:
    model = ModelConfig.model_validate({"name": "m", "path": str(path), "decoder": decoder})
    return StageSpec(model=model, stage=model.decoder)


def pixels(data: bytes) -> NDArray[np.int64]:
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


@pytest.mark.parametrize("kind", ["pictures", "clips"])
def test_several_devices_decode_what_one_does(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (owner, name, least, num) = request.getfixturevalue(kind), MANY[kind]
    counts: list[int] = []
    decode = getattr(owner, name)

    def watched(*args: Any) -> Any:
        counts.append(max(len(arg) for arg in args if isinstance(arg, list | tuple)))
        return decode(*args)

    monkeypatch.setattr(owner, name, watched)
    monkeypatch.setattr(owner, least, num)
    checkpoint = Checkpoint(path)
    wanted = checkpoint.defaults.request(seed=3)
    parcel = Parcel.of(checkpoint.first_latents(wanted))
    decoders = [VaeDecoder(spec_of(path, **options)) for options in ({}, {"num_devices": 2})]
    one, two = (pixels(decoder.preview(parcel, wanted)) for decoder in decoders)
    np.testing.assert_allclose(one, two, atol=1)
    counts.clear()
    format: Any = "mp4" if kind == "clips" else "png"
    one_bytes, two_bytes = (decoder.decode(parcel, wanted, Output(format=format)).data for decoder in decoders)
    assert counts[-1] == 2
    if kind == "pictures":
        np.testing.assert_allclose(pixels(one_bytes), pixels(two_bytes), atol=1)
    else:
        assert np.abs(frames(one_bytes) - frames(two_bytes)).mean() < 1


def frames(data: bytes) -> NDArray[np.int64]:
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


MANY: dict[str, tuple[Any, str, str, int]] = {
    "pictures": (multi_gpu, "decode_in_bands", "MIN_BAND_ROWS", 2),
    "clips": (chunks, "decode_bands", "MIN_BAND_PIXELS", 16),
}


def test_its_own_gpu_comes_first_and_then_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.delenv(VISIBLE)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["3"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    stage = spec_of("flux-shapes", num_gpus=0.1, num_devices=3).stage
    assert stage_devices(stage) == ("cuda:3", "cuda:0", "cuda:1")
    monkeypatch.setenv(VISIBLE, "7,3,6,5")
    assert stage_devices(stage) == ("cuda:1", "cuda:2", "cuda:3")
    assert stage_devices(spec_of("flux-shapes", num_gpus=0.1).stage) == ("cuda",)
    assert stage_devices(spec_of("flux-shapes", num_devices=3).stage) == ("cpu",) * 3
    with pytest.raises(ValueError, match="num_devices is 5, and this node has 4 GPUs"):
        stage_devices(spec_of("flux-shapes", num_gpus=0.1, num_devices=5).stage)


def test_several_gpus_of_its_own() -> None:
    assert own_gpu(["2", "1"], None) == 1
    assert own_gpu(["GPU-b"], "GPU-a,GPU-b") == 1


def test_only_who_computes_on_several_gpus_sees_them_all() -> None:
    for decoder, expected in (({"num_devices": 2, "num_gpus": 0.1}, ALL_GPUS), ({"num_gpus": 1}, None)):
        spec = spec_of("flux-shapes", **decoder)
        deployment: Any = _bind_stage("decoder", VaeDecoder, spec, {})._bound_deployment
        assert deployment.ray_actor_options.get("runtime_env", {}).get("env_vars") == expected


def test_a_machine_with_fewer_gpus_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = with_model(decoder={"num_gpus": 0.1, "num_devices": 3})
    assert num_gpus_needed(config) == 3
    (problem,) = problems(config)
    assert "asks for 3 GPUs and this machine has 1" in problem
    assert num_gpus_needed(with_model(decoder={"num_devices": 3})) == 0
