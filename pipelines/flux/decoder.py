"""Latents to pixels."""

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
class FluxDecoder:
    """The auto-encoder's decoder (``AutoencoderKL``)."""

    vae: Any

    def decode(self, latents: Tensor, request: MediaRequest) -> NDArray[np.uint8]:
        """One frame, uint8 (1, height, width, 3), from ``latents_BCHW``."""
        return to_frames(self.pixels(latents))

    def preview(self, latents: Tensor, request: MediaRequest) -> NDArray[np.uint8]:
        """The same for the latents of a running job."""
        return self.decode(latents, request)

    @torch.no_grad()
    def pixels(self, latents_BCHW: Tensor) -> Tensor:
        """``pixels_BCHW`` in about [-1, 1], on the device."""
        config = self.vae.config
        latents_BCHW = latents_BCHW.to(self.vae.device, self.vae.dtype) / config.scaling_factor + config.shift_factor
        pixels_BCHW: Tensor = self.vae.decode(latents_BCHW, return_dict=False)[0]
        return pixels_BCHW


def load_decoder(path: Path, device: torch.device, dtype: torch.dtype) -> FluxDecoder:
    module = "diffusers.models.autoencoders.autoencoder_kl"
    return FluxDecoder(vae=load_diffusers_model(module, "AutoencoderKL", path, "vae", device, dtype))
