"""What the rest of the project sees of FLUX. Parts are imported when loaded: a process pays for its own only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.defaults import Defaults, with_own_defaults
from pipelines.directory import read_config
from pipelines.flux.geometry import PATCH, scale_factor
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    import torch

    from engines.core.model import DenoiserModel
    from pipelines.flux.decoder import FluxDecoder
    from pipelines.flux.sampler import FluxSampler
    from pipelines.flux.text import FluxConditioning, FluxTextEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxFamily:
    """Implements ``pipelines.family.Family``."""

    name: str = "flux"

    def defaults(self, path: Path) -> Defaults:
        """Returns FLUX.1-dev's if the model takes a guidance scale, else FLUX.1-schnell's, then the folder's own."""
        distilled: bool = read_config(path, "transformer")["guidance_embeds"]
        known = Defaults(
            kind="image",
            width=1024,
            height=1024,
            num_frames=1,
            fps=0,
            num_inference_steps=28 if distilled else 4,
            guidance_scale=3.5 if distilled else 0.0,
            true_cfg_scale=1.0,
            size_multiple=scale_factor(path) * PATCH,
            frame_multiple=1,
            max_pixels=2048 * 2048,
            max_frames=1,
            max_steps=100,
        )
        return with_own_defaults(path, known)

    def load_text_encoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> FluxTextEncoder:
        from pipelines.flux.text import load_text_encoder

        return load_text_encoder(path, device, dtype)

    def load_denoiser(self, path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel:
        from pipelines.flux.denoiser import load_denoiser

        return load_denoiser(path, device, dtype)

    def outline_denoiser(self, path: Path, dtype: torch.dtype) -> DenoiserModel:
        from pipelines.flux.denoiser import outline_denoiser

        return outline_denoiser(path, dtype)

    def blank_conditioning(self, path: Path, request: MediaRequest) -> FluxConditioning:
        from pipelines.flux.text import blank_conditioning

        return blank_conditioning(path, request)

    def load_sampler(self, path: Path, device: torch.device, dtype: torch.dtype) -> FluxSampler:
        from pipelines.flux.sampler import load_sampler

        return load_sampler(path, device, dtype)

    def load_decoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> FluxDecoder:
        from pipelines.flux.decoder import load_decoder

        return load_decoder(path, device, dtype)
