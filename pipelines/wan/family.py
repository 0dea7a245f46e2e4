"""What the rest of the project sees of Wan. Parts are imported when loaded: a process pays for its own only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.defaults import Defaults, with_own_defaults
from pipelines.directory import read_config, read_index
from pipelines.request import MediaRequest
from pipelines.wan.geometry import read_geometry

if TYPE_CHECKING:
    import torch

    from engines.core.model import DenoiserModel
    from pipelines.wan.decoder import WanDecoder
    from pipelines.wan.sampler import WanSampler
    from pipelines.wan.text import WanConditioning, WanTextEncoder

LARGE = Defaults(
    kind="video",
    width=1280,
    height=720,
    num_frames=81,
    fps=16,
    num_inference_steps=50,
    guidance_scale=0.0,
    true_cfg_scale=5.0,
    size_multiple=16,
    frame_multiple=4,
    max_pixels=1280 * 720,
    max_frames=81,
    max_steps=100,
)
"""Wan 2.1 14B; the others differ in a few values (each from its model card on the hub)."""

SMALL = replace(LARGE, width=832, height=480)
TWO_EXPERTS = replace(LARGE, num_inference_steps=40, true_cfg_scale=4.0)
"""The card's guidance scale for high noise. It gives 3.0 for low noise; a request has one scale, which serves both."""
PER_TOKEN_TIME = replace(LARGE, height=704, num_frames=121, fps=24, max_frames=121)
SMALL_LAYERS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class WanFamily:
    """Implements ``pipelines.family.Family``. The guidance scale of this family is ``true_cfg_scale``."""

    name: str = "wan"

    def defaults(self, path: Path) -> Defaults:
        """Returns the defaults of the published model that the folder resembles, then the folder's own."""
        geometry = read_geometry(path)
        known = replace(known_defaults(path), size_multiple=geometry.size_multiple, frame_multiple=geometry.temporal)
        return with_own_defaults(path, known)

    def load_text_encoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> WanTextEncoder:
        from pipelines.wan.text import load_text_encoder

        return load_text_encoder(path, device, dtype)

    def load_denoiser(self, path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel:
        from pipelines.wan.denoiser import load_denoiser

        return load_denoiser(path, device, dtype)

    def outline_denoiser(self, path: Path, dtype: torch.dtype) -> DenoiserModel:
        from pipelines.wan.denoiser import outline_denoiser

        return outline_denoiser(path, dtype)

    def blank_conditioning(self, path: Path, request: MediaRequest) -> WanConditioning:
        from pipelines.wan.text import blank_conditioning

        return blank_conditioning(path, request)

    def load_sampler(self, path: Path, device: torch.device, dtype: torch.dtype) -> WanSampler:
        from pipelines.wan.sampler import load_sampler

        return load_sampler(path, device, dtype)

    def load_decoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> WanDecoder:
        from pipelines.wan.decoder import load_decoder

        return load_decoder(path, device, dtype)


def known_defaults(path: Path) -> Defaults:
    """Wan 2.2 A14B has two transformers, TI2V 5B a timestep a token; Wan 2.1 comes with 30 or 40 layers."""
    index = read_index(path)
    if index.get("boundary_ratio") is not None:
        return TWO_EXPERTS
    if index.get("expand_timesteps"):
        return PER_TOKEN_TIME
    return SMALL if read_config(path, "transformer")["num_layers"] <= SMALL_LAYERS else LARGE
