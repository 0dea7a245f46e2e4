"""Latents to frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.directory import load_diffusers_model
from pipelines.pixels import to_frames
from pipelines.request import MediaRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class WanDecoder:
    """The causal video auto-encoder's decoder (``AutoencoderKLWan``). It keeps a cache: one call at a time."""

    vae: Any

    def decode(self, latents: Tensor, request: MediaRequest) -> NDArray[np.uint8]:
        """All frames, uint8 (frames, height, width, 3), from ``latents_BCFHW`` (one clip)."""
        return to_frames(self.pixels(latents)[0].transpose(0, 1))

    def preview(self, latents: Tensor, request: MediaRequest) -> NDArray[np.uint8]:
        """The first frame: the auto-encoder is causal, so the first latent frame is enough."""
        return self.decode(latents[:, :, :1], request)

    @torch.no_grad()
    def pixels(self, latents_BCFHW: Tensor) -> Tensor:
        """``pixels_BCFHW`` in about [-1, 1], on the device."""
        latents_BCFHW = latents_BCFHW.to(self.vae.device, self.vae.dtype)
        mean, std = (self._per_channel(name, latents_BCFHW) for name in ("latents_mean", "latents_std"))
        pixels_BCFHW: Tensor = self.vae.decode(latents_BCFHW / (1.0 / std) + mean, return_dict=False)[0]
        return pixels_BCFHW

    def _per_channel(self, name: str, like: Tensor) -> Tensor:
        return torch.tensor(getattr(self.vae.config, name)).view(1, -1, 1, 1, 1).to(like)


def load_decoder(path: Path, device: torch.device, dtype: torch.dtype) -> WanDecoder:
    """Always in float32: in half precision this auto-encoder shows banding and flicker, and it is small."""
    module = "diffusers.models.autoencoders.autoencoder_kl_wan"
    return WanDecoder(vae=load_diffusers_model(module, "AutoencoderKLWan", path, "vae", device, torch.float32))
