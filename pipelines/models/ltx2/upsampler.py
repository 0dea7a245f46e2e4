"""LTX-2's latent upsampler, which enlarges a clip between two passes over its latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.ltx2.before_denoise import _normalize_latents, _pack_latents
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from safetensors import safe_open
from torch import Tensor

from engines.parallel.weight_files import files_of
from pipelines.component_weights import load_folder
from pipelines.control_network import UPSAMPLER_FOLDER
from pipelines.directory import part_folder, read_config

STATISTICS = ("latents_mean", "latents_std")
"""Buffers of an auto-encoder by which latents are normalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upsampled:
    """Start of a second pass."""

    inputs: Mapping[str, Any]
    """Inputs of its blocks."""
    latents: Mapping[str, Tensor]
    """The same latents as the decoder takes them."""


class LatentUpsampler:
    """``diffusers.LTX2LatentUpsamplePipeline`` for the finished latents of a first pass.

    The sound stays as it is. ``pipeline`` is that of a rank: its auto-encoders have no weights. They get their
    statistics here, by which the blocks normalise the latents that they are given.
    """

    def __init__(self, path: Path, pipeline: Any, dtype: torch.dtype) -> None:
        self._pipeline, self._device = pipeline, pipeline.device
        for part in ("vae", "audio_vae"):
            _fill_statistics(getattr(pipeline, part), part_folder(path, part), self._device, dtype)
        folder = path / UPSAMPLER_FOLDER
        spec = ComponentSpec(UPSAMPLER_FOLDER, LTX2LatentUpsamplerModel, pretrained_model_name_or_path=str(folder))
        model = load_folder(spec, folder, self._device, dtype)
        self.module = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, made: Mapping[str, Any]) -> Upsampled:
        """Return the inputs of the second pass. ``made`` are the decoder's inputs after the first."""
        state = PipelineState()
        for name, value in {**made, "output_type": "latent"}.items():
            state.set(name, value)
        LTX2AutoDecoderStep()(self._pipeline, state)
        enlarged: Tensor = self.module(state.get("videos").to(self.module.dtype))
        pipeline = self._pipeline
        normal = _normalize_latents(enlarged, pipeline.latents_mean, pipeline.latents_std, pipeline.vae_scaling_factor)
        patches = (pipeline.transformer_spatial_patch_size, pipeline.transformer_temporal_patch_size)
        return Upsampled(
            inputs={"latents": enlarged, "audio_latents": state.get("audio")},
            latents={"latents": _pack_latents(normal, *patches).float(), "audio_latents": made["audio_latents"]},
        )


def weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Return the memory of the upsampler's weights in ``dtype``, from its configuration in ``path`` alone."""
    with torch.device("meta"):
        model: Any = LTX2LatentUpsamplerModel.from_config(dict(read_config(path, UPSAMPLER_FOLDER)))
    return sum(weight.nbytes for weight in model.to(dtype).parameters())


def _fill_statistics(part: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    for file in files_of(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in set(STATISTICS) & set(tensors.keys()):
                setattr(part, name, tensors.get_tensor(name).to(device, dtype))
