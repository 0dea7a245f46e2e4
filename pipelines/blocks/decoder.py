"""Latents to frames, by a pipeline's decoding blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from numpy.typing import NDArray
from torch import Tensor

from pipelines.blocks import tree
from pipelines.blocks.encoder import on_device
from pipelines.blocks.opened import OpenedPipeline
from pipelines.request import MediaRequest

OUTPUTS = ("images", "videos")


def on_white(unit_FHWC: Tensor) -> Tensor:
    """Three channels in [0, 1]; a fourth is how far a pixel covers a white ground."""
    if unit_FHWC.shape[-1] == 3:
        return unit_FHWC
    colours, cover = unit_FHWC[..., :3], unit_FHWC[..., 3:]
    return colours * cover + (1 - cover)


class BlocksDecoder:
    """Decodes one job at a time: auto-encoders of clips keep the frames before."""

    def __init__(self, opened: OpenedPipeline) -> None:
        self._opened = opened
        self._pipeline = opened.load(opened.sections.decode)

    def decode(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        """All frames, uint8 (frames, height, width, 3), from what ``BlocksSampler.latents`` gives."""
        unit_FHWC = on_white(self.pixels(latents).movedim(-3, -1).float())
        frames: NDArray[np.uint8] = (unit_FHWC * 255).round().to(torch.uint8).cpu().numpy()
        return frames

    def preview(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        first = self._opened.architecture.first_frame
        return self.decode(latents if first is None else {**latents, **first(latents)}, request)

    @torch.no_grad()
    def pixels(self, latents: Mapping[str, Any]) -> Tensor:
        """``pixels_FCHW`` in [0, 1], some models' with opacity, in the auto-encoder's dtype, on the device."""
        values = PipelineState()
        for name, spec in self._opened.inputs.items():
            values.set(name, spec.default, spec.kwargs_type)
        for name, value in latents.items():
            values.set(name, self._here(name, value))
        tree.run(self._opened.blocks, [(name,) for name in self._opened.sections.decode], self._pipeline, values)
        output = next(values.get(name) for name in OUTPUTS if values.get(name) is not None)
        pixels = torch.as_tensor(output) if not isinstance(output, list) else torch.stack(output)
        return pixels[0] if pixels.ndim == 5 else pixels

    def _here(self, name: str, value: Any) -> Any:
        vae = getattr(self._pipeline, "vae", None)
        dtypes = (
            {} if vae is None or name != "latents" else dict.fromkeys((torch.float32, self._opened.dtype), vae.dtype)
        )
        return on_device(value, self._opened.device, dtypes)
