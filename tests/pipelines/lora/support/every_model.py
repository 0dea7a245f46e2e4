"""A tiny checkpoint of each model with blocks, and diffusers' latents with an adapter."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from diffusers.modular_pipelines.wan_animate_2 import denoise as animate
from torch import Tensor

from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.lora.lora_cache import LoraCache
from pipelines.lora.source import LoraLimits, LoraSource
from pipelines.models.helios import spec as helios
from pipelines.request import InputPicture, InputPictures, Lora, MediaRequest
from tests.pipelines.support.checkpoints import (
    tiny_animate,
    tiny_cosmos,
    tiny_flux3,
    tiny_helios,
    tiny_hunyuan,
    tiny_ltx,
    tiny_minimax,
    tiny_others,
    tiny_pictures,
    tiny_qwen,
    tiny_unknown,
    tiny_vace,
)
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.own_call import Change, own_state
from tests.pipelines.support.references.own_clips import Images
from tests.pipelines.support.references.picture_cases import small_pictures
from tests.pipelines.support.references.video import Clip, Latents, picture, pictures_of

World = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Model(Clip):
    """A tiny model. ``reference`` takes changes of the pipeline; ``divided`` is the strategy of two ranks, if any.

    In its ``world`` are parts that cannot be loaded here. ``is_long``: it takes many seconds.
    """

    reference: Callable[[Path, MediaRequest, Images, Change], Latents] = own_clips.blocks
    num_latent_frames: int = 1
    divided: str | None = "ulysses"
    world: World = nullcontext
    is_long: bool = False

    def inputs(self, request: MediaRequest) -> InputPictures:
        return pictures_of(self.images(request))


@dataclass(frozen=True, kw_only=True)
class Animated(Model):
    """Its inputs are a character's picture and a driving clip."""

    num_pictures: int = 1
    num_video_frames: int = 5

    def inputs(self, request: MediaRequest) -> InputPictures:
        character = picture(request.width, request.height, 3)
        return replace(super().inputs(request), pictures=(InputPicture.of(character),))


def as_given(folder: Path, request: MediaRequest, images: Images, change: Change) -> Latents:
    """Return FLUX.3's latents without the model that rewrites prompts."""

    def both(pipeline: Any) -> None:
        tiny_flux3.encode_as_given(pipeline)
        change(pipeline)

    return {"latents": own_state(folder, request, change=both).get("latents")}


def chunks(folder: Path, request: MediaRequest, images: Images, change: Change) -> Latents:
    state = own_state(folder, request, change=change, **helios.SPEC.pipeline_inputs(folder, request))
    return {"latents": torch.cat(state.get("latent_chunks"), dim=2)}


def turbo(folder: Path, request: MediaRequest, images: Images, change: Change) -> Latents:
    """Return Ideogram 4's latents by the preset for few steps."""
    schedule = {"guidance_schedule": (7.0,) * (request.num_inference_steps - 1) + (3.0,), "mu": 0.5, "std": 1.75}
    return {"latents": own_state(folder, request, change=change, **schedule).get("latents")}


def one_step_more(folder: Path, request: MediaRequest, images: Images, change: Change) -> Latents:
    """Return MiniMax-H3's latents: diffusers counts the end of the last step as a step."""
    state = own_state(folder, request, change=change, num_inference_steps=request.num_inference_steps + 1)
    return {name: state.get(name) for name in ("latents", "audio_latents")}


def animated(folder: Path, request: MediaRequest, images: Images, change: Change) -> Latents:
    """Return latents without the picture's latent frame."""
    inputs = {"image": picture(request.width, request.height, 3), "driving_video": list(images)}
    latents: list[Tensor] = []

    def decode(vae: Any, segment: Tensor) -> Any:
        latents.append(segment)
        return decoded(vae, segment)

    decoded = animate.decode_vae
    with patch.object(animate, "decode_vae", decode):
        own_state(folder, request, change=change, segment_frame_length=request.num_frames, **inputs)
    return {"latents": torch.cat(latents, dim=1)}


def loading(name: str, make: Callable[[], Any]) -> World:
    """Replace the processor that needs torchvision by ``make()``."""

    @contextmanager
    def world() -> Any:
        with patch(name, lambda *_, **__: make()):
            yield

    return world


@contextmanager
def loading_for_words() -> Any:
    """Skip a step of diffusers' loader that reads a setting which Wan Animate 2's transformer lacks."""

    def as_it_is(cls: type, transformer: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return state_dict

    with patch.object(WanLoraLoaderMixin, "_maybe_expand_t2v_lora_for_i2v", classmethod(as_it_is)):
        yield


ALONE = {"true_cfg_scale": 1.0}
MODELS = {
    "flux 2 dev": Model(make=tiny_pictures.flux2_dev, is_long=True),
    "qwen edit": Model(make=tiny_qwen.qwen_edit, num_pictures=1, world=small_pictures, is_long=True),
    "qwen edit plus": Model(make=tiny_qwen.qwen_edit_plus, num_pictures=1, world=small_pictures, is_long=True),
    "qwen 2.1": Model(
        make=tiny_qwen.qwen21,
        divided="tensor",
        world=loading("transformers.Qwen3VLProcessor.from_pretrained", tiny_qwen.Qwen3Processor),
    ),
    "sd 3": Model(make=tiny_others.sd3),
    "sd 3.5 medium": Model(make=tiny_others.sd35_medium, divided=None, is_long=True),
    "sdxl": Model(make=tiny_unknown.sdxl, divided=None),
    "krea 2": Model(make=tiny_others.krea2, is_long=True),
    "ernie": Model(make=tiny_others.ernie_image),
    "ideogram 4": Model(make=tiny_others.ideogram4, reference=turbo, is_long=True),
    "flux 3": Model(
        make=tiny_flux3.flux3,
        reference=as_given,
        world=loading(tiny_flux3.LOAD_PROCESSOR, tiny_flux3.Flux3Processor),
        changes=ALONE,
        is_long=True,
    ),
    "ltx": Model(make=tiny_ltx.ltx, reference=own_clips.timed_blocks, num_latent_frames=2),
    "ltx 2": Model(
        make=tiny_ltx.ltx2_few_layers, reference=own_clips.sounding_blocks, num_latent_frames=2, changes=ALONE
    ),
    "hunyuan video 1.5": Model(
        make=tiny_hunyuan.hunyuan_video, reference=own_clips.hunyuan_blocks, num_latent_frames=2, is_long=True
    ),
    "helios": Model(make=tiny_helios.helios, reference=chunks, num_latent_frames=2),
    "minimax h3": Model(
        make=tiny_minimax.minimax_h3,
        reference=one_step_more,
        sides=(2, 3),
        num_latent_frames=120,
        world=loading(tiny_minimax.LOAD_PROCESSOR, tiny_minimax.MiniMaxProcessor),
        is_long=True,
    ),
    "wan animate 2": Animated(
        make=tiny_animate.wan_animate2, reference=animated, num_latent_frames=2, world=loading_for_words
    ),
    "anima": Model(make=tiny_unknown.anima, divided=None),
    "wan vace": Model(
        make=tiny_vace.wan_vace, reference=own_clips.vace_pipeline, num_latent_frames=2, num_video_frames=5
    ),
    "cosmos 3": Model(make=tiny_cosmos.cosmos, reference=own_clips.guided_blocks, num_latent_frames=3),
}


def painted(
    name: str,
    folder: Path,
    sources: tuple[LoraSource, ...],
    mixes: tuple[tuple[Lora, ...], ...],
    limits: LoraLimits | None = None,
) -> list[dict[str, Tensor]]:
    """Return latents of a job with each of ``mixes``, made one step of each in turn, by all ranks.

    With ``limits``, adapters may come at run time.
    """
    model, checkpoint = MODELS[name], Checkpoint(folder, loras=sources, runtime_loras=limits)
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    denoiser = checkpoint.denoiser()
    engine = TorchEngine(denoiser, strategy=model.divided or "ulysses")
    request, sampler = model.request(folder), checkpoint.sampler()
    with model.world():
        encoded = checkpoint.text_encoder().encode(request, model.inputs(request))
    conditioning = pickle.loads(pickle.dumps(encoded))
    requests = [replace(request, loras=mix) for mix in mixes]
    held = [denoiser.additions.for_request(one) for one in requests if isinstance(denoiser.additions, LoraCache)]
    states = [sampler.begin(one, conditioning) for one in requests]
    for _ in range(sampler.num_steps(states[0])):
        states = [sampler.advance(state, engine.predict(sampler.branches(state), ranks)) for state in states]
    engine.close()
    assert limits is None or len(held) == len(requests)
    return [latents_of(sampler.latents(state)) for state in states]


def latents_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return latents by name; those of a clip in chunks are concatenated."""
    if "latent_chunks" in values:
        return {"latents": torch.cat(values["latent_chunks"], dim=2)}
    if "finished_segments" in values:
        segments = (*values["finished_segments"], values["latents"])
        return {"latents": torch.cat([segment[:, 1:] for segment in segments], dim=1)}
    return {name: x for name, x in values.items() if name.endswith("latents") and isinstance(x, Tensor)}
