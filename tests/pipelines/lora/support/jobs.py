"""Tiny models with two adapters, and alternating jobs with either, both or none."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.lora.lora_cache import LoraCache
from pipelines.lora.source import LORA_FILE, PEFT_CONFIG, LoraLimits, LoraSource
from pipelines.request import Lora, MediaRequest
from tests.pipelines.lora.support.tiny_lora import reference
from tests.pipelines.support.checkpoints import tiny, tiny_models

TOLERANCE = 1e-4
"""Relative, in float32: low-rank products are added to weights here, and to activations there."""

NONE: tuple[Lora, ...] = ()
ONE = (Lora(name="one", scale=0.8),)
BOTH = (Lora(name="one", scale=0.8), Lora(name="two", scale=-0.5))
TURNS = (NONE, ONE, BOTH, NONE, ONE, (Lora(name="two", scale=0.0),))

MODELS: dict[str, Callable[[Path], Path]] = {
    "flux": tiny.flux,
    "flux2 klein": tiny_models.flux2_klein,
    "qwen": tiny_models.qwen_image,
    "wan": tiny.wan,
    "z image": tiny_models.z_image,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    num_ranks: int = 1
    strategy: str = "ulysses"
    fast: bool | None = False
    sliced: bool = False
    device: str = "cpu"
    precision: str = "auto"
    attention: str = "auto"
    dtype: torch.dtype = torch.float32
    runtime_loras: LoraLimits | None = None


@dataclass(frozen=True, kw_only=True)
class Served:
    folder: Path
    one: Path
    two: Path

    @property
    def named(self) -> tuple[LoraSource, ...]:
        return (LoraSource(name="one", path=str(self.one)), LoraSource(name="two", path=str(self.two)))

    @property
    def always(self) -> tuple[LoraSource, ...]:
        return (LoraSource(path=str(self.one), scale=0.8), LoraSource(path=str(self.two), scale=-0.5))

    def expected(self, request: MediaRequest) -> Tensor:
        paths = {"one": self.one, "two": self.two}
        return expected(self.folder, request, tuple((paths[lora.name], lora.scale) for lora in request.loras))


@cache
def expected(folder: Path, request: MediaRequest, adapters: tuple[tuple[Path, float], ...]) -> Tensor:
    return reference(folder, replace(request, loras=()), dict(adapters))


@cache
def encoded(folder: Path, request: MediaRequest, device: str, dtype: torch.dtype) -> bytes:
    """Return the packed conditioning, made once in a process: adapters do not change encoders."""
    return pickle.dumps(Checkpoint(folder, device, dtype).text_encoder().encode(request))


def painted(
    folder: Path, sources: tuple[LoraSource, ...], requests: list[MediaRequest], setting: Setting
) -> list[Tensor]:
    """Return the latents of ``requests``, made one step of each in turn, as a gang does."""
    limits = setting.runtime_loras
    checkpoint = Checkpoint(folder, setting.device, setting.dtype, loras=sources, runtime_loras=limits)
    model = checkpoint.denoiser(sliced=setting.sliced)
    engine = TorchEngine(
        model,
        strategy=setting.strategy,
        precision=setting.precision,
        attention=setting.attention,
        fast=setting.fast,
    )
    sampler, ranks = checkpoint.sampler(), tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    conditioning = pickle.loads(encoded(folder, requests[0], setting.device, setting.dtype))
    held = [model.additions.for_request(request) for request in requests if isinstance(model.additions, LoraCache)]
    states = [sampler.begin(request, conditioning) for request in requests]
    for _ in range(sampler.num_steps(states[0])):
        states = [sampler.advance(state, engine.predict(sampler.branches(state), ranks)) for state in states]
    assert limits is None or len(held) == len(requests)
    engine.close()
    return [sampler.latents(state)["latents"] for state in states]


def folder_of(adapter: Path, folder: Path) -> str:
    """Return the folder of the adapter in the data directory, as added at run time."""
    folder.mkdir(parents=True)
    (file,) = adapter.glob("*.safetensors")
    shutil.copy(file, folder / LORA_FILE)
    for config in adapter.glob(PEFT_CONFIG):
        shutil.copy(config, folder / PEFT_CONFIG)
    return str(folder)
