"""A pipeline without modular blocks: its own ``__call__`` runs on one rank a gang.

Capabilities come from the signature of the call, and sizes from the configuration of its parts. A folder's
``troupe.json`` may give both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from engines.core.shard_plan import ShardPlan
from pipelines.defaults import Defaults
from pipelines.directory import (
    CLASSIC,
    CLASSIC_INDEX,
    DENOISERS,
    has_blocks,
    has_own_inputs,
    part_class,
    part_folder,
    read_config,
    read_index,
)
from pipelines.latent_sizes import STAGES
from pipelines.models.generic.spec import CLIP, FPS, LONGEST_CLIP, NUM_FRAMES, NUM_STEPS, PICTURE, TOKENS, GenericSpec
from pipelines.models.spec import Config

NEEDS_PICTURE = ("Img2Img", "ImageToImage", "ImageToVideo", "Inpaint", "Edit", "Upscale")
"""Parts of the names of pipelines that need a picture, although their signature has a default."""
NEEDS_VIDEO = ("VideoToVideo", "Edit")
"""The same for a clip."""
REFERENCES, MAX_REFERENCES = "reference_images", 4
"""The input for pictures of what the clip shows, and how many are taken."""
DISTILLED_SCALE = "distilled_guidance_scale"
"""The input for a distilled scale beside a guider (HunyuanImage), where the transformer embeds it."""
LISTED = ("GlmImagePipeline",)
"""Pipelines whose ``image`` is a list of pictures, however many there are."""
VIDEO_MASK = "mask"
"""The input for a mask of each frame of the clip."""
CONTROL, CONTROL_SCALE, VIDEO_SCALE = "control_image", "controlnet_conditioning_scale", "conditioning_scale"
SPATIAL = ("scale_factor_spatial", "spatial_compression_ratio", "ffactor_spatial")
TEMPORAL = ("scale_factor_temporal", "temporal_compression_ratio", "ffactor_temporal")
"""Keys of auto-encoders' configurations: pixels and frames per latent value."""
SAMPLE_SIZE = "default_sample_size"
SIDES = ("sample_width", "sample_height")
USUAL_SCALE, USUAL_TEMPORAL = 8, 4


def whole_spec(path: Path) -> WholeSpec | None:
    """Return the spec of a classic pipeline of diffusers without blocks; None for folders of any other kind."""
    if not (path / CLASSIC_INDEX).is_file():
        return None
    name = str(read_index(path).get("_class_name"))
    pipeline = getattr(import_module("diffusers"), name, None) if name.endswith(CLASSIC) else None
    return None if pipeline is None or (has_blocks(path) and not has_own_inputs(path)) else WholeSpec(pipeline)


class WholeSpec(GenericSpec):
    """A class of diffusers' classic pipelines. Nothing of it is divided, exported, quantised or cached."""

    is_whole = True
    eager_only = "is called by its own pipeline"

    def __init__(self, pipeline_class: Any) -> None:
        super().__init__(pipeline_class)
        self.pipeline_class = pipeline_class

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs of the call with their defaults; None for those without a default."""
        parameters = inspect.signature(self.pipeline_class.__call__).parameters.values()
        return {one.name: None if one.default is one.empty else one.default for one in parameters}

    @property
    def has_distilled_scale(self) -> bool:
        """True if the call's ``guidance_scale`` is no weight of a negative prompt."""
        return "true_cfg_scale" in self.inputs or "negative_prompt" not in self.inputs

    @cached_property
    def control(self) -> str | None:
        """The input for the control picture; without one of that name, it is the ``image`` of a control network."""
        if CONTROL in self.inputs:
            return CONTROL
        return "image" if CONTROL_SCALE in self.inputs and "image" in self.inputs else None

    @property
    def lists_pictures(self) -> bool:
        """True if the call takes pictures as a list, even a single one."""
        return self.family in LISTED

    @property
    def _has_picture(self) -> bool:
        return "image" in self.inputs and self.control != "image"

    def auto_encoder(self, path: Path) -> Any:
        parameters = inspect.signature(self.pipeline_class.__init__).parameters
        return parameters["vae"].annotation if "vae" in parameters else None

    def shard_plan(self, config: Config) -> ShardPlan:
        return ShardPlan(streams=(TOKENS,), blocks=(), shards=(), gathers=(), linears=())

    def defaults(self, path: Path) -> Defaults:
        inputs, has_picture = self.inputs, self._has_picture
        is_video = "num_frames" in self.inputs or "video" in self.inputs
        scale, temporal = vae_scales(path)
        width, height = self._size(path, scale, CLIP if is_video else PICTURE)
        num_frames = self._num_frames(path, temporal) if is_video else 1
        is_in_groups = (num_frames - 1) % temporal == 0
        max_frames = max(LONGEST_CLIP, num_frames) if is_video else 1
        return Defaults(
            kind="video" if is_video else "image",
            width=width,
            height=height,
            num_frames=num_frames,
            fps=int(inputs.get("fps") or inputs.get("frame_rate") or FPS) if is_video else 0,
            num_inference_steps=int(inputs.get("num_inference_steps") or NUM_STEPS),
            **self._guidance(path),
            size_multiple=math.lcm(16, scale * _patch_size(path)),
            frame_multiple=temporal if is_video and is_in_groups else 1,
            max_pixels=max(1280 * 720 if is_video else 2048 * 2048, width * height),
            max_frames=max_frames,
            max_steps=max(100, int(inputs.get("num_inference_steps") or 0)),
            max_pictures=MAX_REFERENCES if REFERENCES in inputs or self.lists_pictures else int(has_picture),
            min_pictures=int(has_picture and self._needs_picture),
            takes_mask=has_picture and "mask_image" in inputs,
            needs_mask=has_picture and "mask_image" in inputs and self._needs_picture,
            masks_video="video" in inputs and VIDEO_MASK in inputs,
            takes_control=self.control is not None,
            needs_control=self.control is not None,
            control_scale=float(inputs.get(CONTROL_SCALE) or inputs.get(VIDEO_SCALE) or 0.0),
            takes_control_guidance=self.control is not None and "control_guidance_start" in inputs,
            max_video_frames=max_frames if "video" in inputs else 0,
            needs_video=self._needs_video,
            takes_both="video" in inputs and REFERENCES in inputs,
            keeps_length="video" in inputs and self._keeps_length,
            takes_strength=self._takes_strength,
            strength=float(inputs.get("strength") or 1.0),
            rounds_steps_down=True,
            takes_cache=False,
        )

    @property
    def _needs_picture(self) -> bool:
        parameter = inspect.signature(self.pipeline_class.__call__).parameters["image"]
        return parameter.default is parameter.empty or any(word in self.family for word in NEEDS_PICTURE)

    @property
    def _needs_video(self) -> bool:
        parameter = inspect.signature(self.pipeline_class.__call__).parameters.get("video")
        if parameter is None:
            return False
        return parameter.default is parameter.empty or any(word in self.family for word in NEEDS_VIDEO)

    @property
    def _keeps_length(self) -> bool:
        """True if the result has as many frames as the input clip: the call changes them, or fills a mask in each."""
        return "num_frames" not in self.inputs or VIDEO_MASK in self.inputs or "Edit" in self.family

    @property
    def _takes_strength(self) -> bool:
        """True if ``strength`` is a share of the steps; beside a ``denoise_strength`` it is a weight of the picture."""
        has_source = self._has_picture or "video" in self.inputs
        return has_source and "strength" in self.inputs and "denoise_strength" not in self.inputs

    def _guidance(self, path: Path) -> dict[str, Any]:
        scale, true_scale = self.inputs.get("guidance_scale"), self.inputs.get("true_cfg_scale")
        if DISTILLED_SCALE in self.inputs:
            is_distilled = _denoiser_config(path).get("guidance_embeds")
            distilled = float(self.inputs[DISTILLED_SCALE] or 0.0) if is_distilled else 0.0
            return {"guidance_scale": distilled, "true_cfg_scale": 1.0}
        if self.has_distilled_scale:
            return {"guidance_scale": float(scale or 0.0), "true_cfg_scale": float(true_scale or 1.0)}
        return {"guidance_scale": 0.0, "true_cfg_scale": float(scale or 1.0)}

    def _size(self, path: Path, scale: int, usual: tuple[int, int]) -> tuple[int, int]:
        """Return the call's size, else the transformer's, else ``usual``."""
        width, height = self.inputs.get("width"), self.inputs.get("height")
        config = _denoiser_config(path)
        side, sides = config.get("sample_size"), [config[name] for name in SIDES if config.get(name)]
        if width and height:
            return int(width), int(height)
        if len(sides) == len(SIDES):
            return sides[0] * scale, sides[1] * scale
        if not isinstance(side, int):
            side = self._sample_size if usual == PICTURE else None
        return usual if side is None else (side * scale, side * scale)

    @cached_property
    def _sample_size(self) -> int | None:
        """Latent values a side of the pipeline's own default, which its constructor sets; None if it sets none."""
        parameters = inspect.signature(self.pipeline_class.__init__).parameters.values()
        needed = [one.name for one in parameters if one.default is one.empty and one.name != "self"]
        try:
            side = getattr(self.pipeline_class(**dict.fromkeys(needed)), SAMPLE_SIZE, None)
        except (AttributeError, TypeError, ValueError):  # it reads its parts
            return None
        return side if isinstance(side, int) else None

    def _num_frames(self, path: Path, temporal: int) -> int:
        """Return the call's number, else the transformer's: some count frames of latents, others those of the clip."""
        if number := self.inputs.get("num_frames"):
            return int(number)
        frames = _denoiser_config(path).get("sample_frames")
        if not isinstance(frames, int):
            return NUM_FRAMES
        return frames if (frames - 1) % temporal == 0 else frames * temporal


def vae_scales(path: Path) -> tuple[int, int]:
    """Return pixels per latent value, and frames per latent frame, as the auto-encoder's configuration says."""
    if part_class(path, "vae") is None or not (part_folder(path, "vae") / "config.json").is_file():
        return USUAL_SCALE, USUAL_TEMPORAL
    config = read_config(path, "vae")
    stages = next((2 ** (len(config[name]) - 1) for name in STAGES if name in config), USUAL_SCALE)
    spatial = next((int(config[name]) for name in SPATIAL if config.get(name)), stages)
    return spatial, next((int(config[name]) for name in TEMPORAL if config.get(name)), USUAL_TEMPORAL)


def _denoiser_config(path: Path) -> Mapping[str, Any]:
    return read_config(path, next(part for part in DENOISERS if part_class(path, part) is not None))


def _patch_size(path: Path) -> int:
    size = _denoiser_config(path).get("patch_size") or 1
    return int(size[-1] if isinstance(size, list | tuple) else size)
