"""In every family, jobs with blocks in host memory have the same bytes as with weights on the device.

A GPU cannot compute with host memory. Weights of offloaded blocks are NaN here unless they are on the device: a layer
outside its block shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.parallel.offload import _HostBlock
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from pipelines.checkpoint import Checkpoint
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.lora.support.every_model import ALONE, MODELS, Animated, Model, latents_of
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_animate,
    tiny_cosmos,
    tiny_helios,
    tiny_ltx,
    tiny_models,
    tiny_others,
    tiny_pictures,
    tiny_qwen,
    tiny_video,
)
from tests.pipelines.support.references.picture_cases import small_pictures

ALL = 1000
"""More blocks than any module has."""

CASES = {
    **MODELS,
    "flux": Model(make=tiny.flux),
    "flux kontext": Model(make=tiny_pictures.flux_kontext, num_pictures=1, world=small_pictures),
    "flux 2 klein": Model(make=tiny_models.flux2_klein),
    "qwen": Model(make=tiny_models.qwen_image),
    "qwen layered": Model(make=tiny_qwen.qwen_layered, num_pictures=1, world=small_pictures),
    "z image": Model(make=tiny_models.z_image, changes={"true_cfg_scale": 3.0}),
    "sd 3.5 large": Model(make=tiny_others.sd35_large),
    "wan": Model(make=tiny.wan, num_latent_frames=2),
    "wan 2.2": Model(make=tiny.wan22, num_latent_frames=2, changes={"num_inference_steps": 4}),
    "wan 2.2, a time for each token": Model(make=tiny.wan_per_token, num_latent_frames=2),
    "wan from a picture": Model(make=tiny_video.wan_picture, num_latent_frames=2, num_pictures=1),
    "cosmos 3 with sound": Model(make=tiny_cosmos.cosmos_with_sound, num_latent_frames=3, changes=ALONE),
    "helios pyramid": Model(make=tiny_helios.helios_pyramid, num_latent_frames=2, changes={"num_inference_steps": 3}),
    "wan animate 2, distilled": Animated(make=tiny_animate.wan_animate2_distilled, num_latent_frames=2, changes=ALONE),
    "ltx 2 with guidance": Model(make=tiny_ltx.ltx2, num_latent_frames=2),
}
WITHOUT = ("sdxl", "anima")
"""A U-Net has no repeated blocks, and diffusers declares none for the transformer of Anima."""


@contextmanager
def engine_of(checkpoint: Checkpoint, number: int) -> Iterator[TorchEngine]:
    """Yield an engine with ``number`` blocks in host memory."""
    denoiser, options = checkpoint.denoiser(num_offloaded=number), TorchOptions(offloaded_blocks=number)
    for weight in (x for module in denoiser.modules.values() for x in module.parameters()):
        weight.data = weight.data.clone()  # aligned memory: CPU kernels round differently for views of a file
    with closing(TorchEngine(denoiser, options=options, fast=False)) as engine:
        yield engine


def run_model(pipeline: Pipeline, model: Model, folder: Path) -> dict[str, Tensor]:
    request = model.request(folder)
    return latents_of(pipeline.denoise(request, model.inputs(request)))


def num_copies(engine: TorchEngine) -> int:
    return sum(offload.num_copies for offload in engine._sharded._offloads)


def leave_nothing(block: _HostBlock) -> None:
    block._point_to([torch.full_like(host, torch.nan if host.is_floating_point() else 0) for host in block._hosts])


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT])
def test_jobs_have_the_same_bytes(name: str, folders: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder and decoder are loaded once, since offloading does not change them."""
    model, folder = CASES[name], folders(CASES[name].make)
    checkpoint = Checkpoint(folder)
    with model.world():
        with engine_of(checkpoint, 0) as plain:
            pipeline = load_pipeline(checkpoint, plain)
            expected = run_model(pipeline, model, folder)
            assert not num_copies(plain)
        monkeypatch.setattr(_HostBlock, "leave", leave_nothing)
        with engine_of(checkpoint, ALL) as offloading:
            latents = run_model(replace(pipeline, engine=offloading), model, folder)
            assert num_copies(offloading)
    assert latents.keys() == expected.keys()
    for key, x in expected.items():
        assert x.isfinite().all()
        assert torch.equal(latents[key], x), key
