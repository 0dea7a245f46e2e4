"""Decode latents to frames with a pipeline's decoding blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from numpy.typing import NDArray
from torch import Tensor, nn

from pipelines.blocks import tree
from pipelines.blocks.compilation import compile_calls, compile_decoder
from pipelines.blocks.encoder import on_device
from pipelines.blocks.opened import OpenedPipeline, modules_of
from pipelines.blocks.sampler import check_finite, finite_flags
from pipelines.media.picture import laid_over_white
from pipelines.media.sound import Sound
from pipelines.request import MediaRequest
from pipelines.vae.chunks import ChunkedVae, decodes_in_chunks, on_stream, skip_unread_cache
from pipelines.vae.fused_clips import is_fused_clip_decoder
from pipelines.vae.multi_gpu import distribute_decoder
from pipelines.vae.strips import check_fits, limit_memory, release_cached_memory

OUTPUTS = ("images", "videos")
SOUNDS = ("audio", "sound")
RATE = "sampling_rate"
FRAMES_AT_A_TIME = 4
"""Frames of a clip that are converted to bytes together: those of a latent frame."""
URGENT = -1
"""Priority of a stream whose kernels run before those of other streams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedMedia:
    """A picture, its layers, or a clip."""

    frames_FHWC: NDArray[np.uint8]
    """uint8 (frames, height, width, 3), or a picture's layers (layers, height, width, 4)."""
    sound: Sound | None = None
    """Samples of a clip with sound; None: silent, or a picture."""


def on_white(unit_FHWC: Tensor) -> Tensor:
    """Return three channels in [0, 1], blended onto white by the fourth, the opacity."""
    if unit_FHWC.shape[-1] == 3:
        return unit_FHWC
    colours, cover = unit_FHWC[..., :3], unit_FHWC[..., 3:]
    return colours * cover + (1 - cover)


class BlocksDecoder:
    """Decodes one job at a time: auto-encoders of clips cache the previous frames.

    ``compiled``: all sizes run fused on CUDA, else those that are decoded inside ``compile_calls`` run compiled. They
    stay on the pipeline's own device. ``memory_bytes``: the memory that a
    decode may take beside the weights. Larger pictures are decoded in strips, and unused memory is released. ``others``
    are further devices for large pictures and clips.
    """

    def __init__(
        self,
        opened: OpenedPipeline,
        *,
        compiled: bool = False,
        memory_bytes: int | None = None,
        others: Sequence[torch.device] = (),
    ) -> None:
        self._opened, self._memory_bytes, self._others = opened, memory_bytes, others
        self._pipeline = opened.load(opened.sections.decode)
        vae: Any = getattr(self._pipeline, "vae", None)
        if hasattr(vae, "enable_slicing"):
            vae.enable_slicing()  # decode a picture's layers one by one, in less memory
        if decodes_in_chunks(vae):
            skip_unread_cache(vae)
        self._compiled = compile_decoder(self._pipeline.vae) if compiled else ()
        if memory_bytes is not None:
            limit_memory(self._pipeline.vae, memory_bytes)
        self._decoders = distribute_decoder(self._pipeline.vae, others, memory_bytes, self._is_ready) if others else ()

    def _is_ready(self, latents_BCHW: Tensor) -> bool:
        return any(part.is_ready(latents_BCHW) for part in self._compiled)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models with weights, of any part."""
        return modules_of(self._pipeline)

    def compile_calls(self) -> AbstractContextManager[None]:
        """Compile the decoder for the sizes that are decoded inside the block."""
        return compile_calls(self._compiled)

    @torch.no_grad()
    def warm_kernels(self) -> None:
        """Decode three small latent frames if the decoder of clips is fused: they need the kernels of every size.

        One frame before a frame, and two, have kernels of their own. Where frames are not decoded one by one, so has a
        clip of one frame.
        """
        vae: Any = getattr(self._pipeline, "vae", None)
        if not is_fused_clip_decoder(getattr(vae, "decoder", None)):
            return
        channels = vae.config.get("z_dim") or vae.config.latent_channels
        for num_frames in (3,) if decodes_in_chunks(vae) else (1, 3):
            vae.decode(torch.zeros(1, channels, num_frames, 2, 2, device=self._opened.device, dtype=vae.dtype))

    def check_fits(self, request: MediaRequest) -> None:
        """Raise ValueError for a picture whose decode cannot fit the GPU.

        Decodes in strips or on several GPUs take less, and are not refused.
        """
        vae, device = getattr(self._pipeline, "vae", None), self._opened.device
        is_whole = self._memory_bytes is None and not self._others
        if device.type == "cuda" and is_whole and vae is not None:
            available_bytes = int(torch.cuda.get_device_properties(device).total_memory)
            check_fits(vae, request.width, request.height, available_bytes)

    def decode_all(self, latents: Mapping[str, Any], request: MediaRequest) -> DecodedMedia:
        """Return all media that the blocks make of ``latents``, an output of ``BlocksSampler.latents``."""
        media = self._media(self._run(latents), request)
        self._release_memory()
        return media

    def decode_chunks(self, latents: Mapping[str, Any], request: MediaRequest) -> Iterator[DecodedMedia]:
        """Yield the frames of ``decode_all`` as they are decoded; sound comes with the last of them.

        There is one chunk unless ``comes_in_chunks``. On a GPU the next chunk is issued before the host waits for the
        frames of a chunk.
        """
        if not self.comes_in_chunks:
            yield self.decode_all(latents, request)
            return
        device, aside = self._opened.device, self._aside
        if aside is None:
            yield from self._decode_chunks(latents, request, None)
            return
        main = torch.get_device_module(device).current_stream(device)
        aside.wait_stream(main)
        yield from on_stream(self._decode_chunks(latents, request, main), device, aside)

    @cached_property
    def _aside(self) -> Any:
        """The stream for work on chunks while later ones are computed; None on CPUs, which do one after the other.

        The host waits for that work before it issues the next chunk. It must not wait for the one that is computed.
        """
        device = self._opened.device
        return torch.get_device_module(device).Stream(device, priority=URGENT) if device.type == "cuda" else None

    def _decode_chunks(self, latents: Mapping[str, Any], request: MediaRequest, main: Any) -> Iterator[DecodedMedia]:
        """Yield the chunks; they are computed on the stream ``main``, all else on the current one."""
        values, pipeline, num_frames = self._values(latents), copy.copy(self._pipeline), 0
        pipeline.vae = vae = ChunkedVae(self._pipeline.vae, self._decoders, main)
        for path in tree.leaves(self._opened.blocks, self._opened.sections.decode, values):
            before = dict(values.values)
            self._run_blocks([path], pipeline, values)
            while vae.num_left:
                pixels_FCHW = _pixels(values)
                yield DecodedMedia(frames_FHWC=to_frames(_cut(pixels_FCHW, request, num_frames), request))
                num_frames += len(pixels_FCHW)
                values.values = dict(before)
                self._run_blocks([path], pipeline, values)
        pixels_FCHW = _pixels(values)
        sound = self._sound(values, request, min(1.0, request.num_frames / (num_frames + len(pixels_FCHW))))
        media = DecodedMedia(frames_FHWC=to_frames(_cut(pixels_FCHW, request, num_frames), request), sound=sound)
        self._release_memory()
        yield media

    def decode(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        """Return all frames, or layers, as in ``DecodedMedia``, from an output of ``BlocksSampler.latents``."""
        frames_FHWC = to_frames(_cut(self.pixels(latents), request), request)
        self._release_memory()
        return frames_FHWC

    def preview(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        """Return opaque frames from unfinished latents; layers are composited."""
        config = self._opened.part_config(self._opened.transformers[0])
        first = self._opened.spec.first_frame(config, latents)
        frames_FHWC = self.decode({**latents, **first}, request)
        return laid_over_white(frames_FHWC)[None] if request.num_layers else frames_FHWC

    def pixels(self, latents: Mapping[str, Any]) -> Tensor:
        """Return ``pixels_FCHW`` in [0, 1], some models' with opacity, in the auto-encoder's dtype, on the device."""
        return _pixels(self._run(latents))

    @cached_property
    def comes_in_chunks(self) -> bool:
        """True if the auto-encoder decodes a clip in chunks and no guardrail needs the whole clip."""
        vae = getattr(self._pipeline, "vae", None)
        if getattr(self._pipeline, "requires_safety_checker", False) or vae is None:
            return False
        return self._opened.spec.decodes_frames_apart and decodes_in_chunks(vae)

    def _run(self, latents: Mapping[str, Any]) -> PipelineState:
        values = self._values(latents)
        self._run_blocks([(name,) for name in self._opened.sections.decode], self._pipeline, values)
        return values

    @torch.no_grad()
    def _run_blocks(self, paths: Iterable[tree.Path], pipeline: Any, values: PipelineState) -> None:
        tree.run(self._opened.blocks, paths, pipeline, values)

    def _values(self, latents: Mapping[str, Any]) -> PipelineState:
        values = self._opened.state({})
        for name, value in latents.items():
            values.set(name, self._to_device(name, value))
        return values

    def _media(self, values: PipelineState, request: MediaRequest) -> DecodedMedia:
        pixels_FCHW = _pixels(values)
        requested_FCHW = _cut(pixels_FCHW, request)
        sound = self._sound(values, request, len(requested_FCHW) / len(pixels_FCHW))
        frames_FHWC = to_frames(requested_FCHW, request)
        return DecodedMedia(frames_FHWC=frames_FHWC, sound=sound)

    def _release_memory(self) -> None:
        if self._memory_bytes is not None:
            for device in (self._opened.device, *self._others):
                release_cached_memory(device, self._memory_bytes)

    def _sound(self, values: PipelineState, request: MediaRequest, share: float) -> Sound | None:
        """Return the first ``share`` of the samples that the blocks made; None if the request disables sound."""
        samples = next((x for name in SOUNDS if (x := values.get(name)) is not None), None)
        if samples is None or request.sound is False:
            return None
        rate = values.get(RATE) or self._pipeline.vocoder.config.output_sampling_rate
        samples_CT = samples[0] if samples.ndim == 3 else samples
        requested_CT = samples_CT[:, : round(share * samples_CT.shape[1])]
        return Sound(samples_CT=requested_CT.float().cpu().numpy(), rate=int(rate))

    def _to_device(self, name: str, value: Any) -> Any:
        vae, dtypes = getattr(self._pipeline, "vae", None), {}
        if vae is not None and name == "latents":
            dtypes = dict.fromkeys((torch.float32, self._opened.dtype), vae.dtype)
        return on_device(value, self._opened.device, dtypes)


def _pixels(values: PipelineState) -> Tensor:
    output = next(values.get(name) for name in OUTPUTS if values.get(name) is not None)
    pixels = torch.as_tensor(output) if not isinstance(output, list) else torch.stack(output)
    return pixels[0] if pixels.ndim == 5 else pixels


def _cut(pixels_FCHW: Tensor, request: MediaRequest, num_before: int = 0) -> Tensor:
    """Cut the clip to the requested length: some models make certain lengths only."""
    return pixels_FCHW[: max(0, request.num_frames - num_before)] if request.kind == "video" else pixels_FCHW


def to_frames(pixels_FCHW: Tensor, request: MediaRequest) -> NDArray[np.uint8]:
    """Convert a few frames at a time, since intermediates are float32, and on the device, which is faster.

    Pictures and layers, which may be larger, are converted one by one. ValueError or JobFailedError if pixels are not
    finite.
    """
    has_opacity, sums = request.num_layers > 0, []
    frames_FHWC = np.empty((len(pixels_FCHW), *pixels_FCHW.shape[-2:], 4 if has_opacity else 3), np.uint8)
    count = FRAMES_AT_A_TIME if request.kind == "video" else 1
    targets = torch.split(torch.from_numpy(frames_FHWC), count)
    for target_FHWC, some_FCHW in zip(targets, torch.split(pixels_FCHW, count), strict=True):
        unit_FHWC = some_FCHW.movedim(-3, -1).float()
        unit_FHWC = unit_FHWC if has_opacity else on_white(unit_FHWC)
        sums.append(unit_FHWC.sum())  # one pass, and no tensor of flags
        target_FHWC.copy_((unit_FHWC * 255).round_().to(torch.uint8).contiguous())
    check_finite(finite_flags({"sums": sums}), request, "pixels")
    return frames_FHWC
