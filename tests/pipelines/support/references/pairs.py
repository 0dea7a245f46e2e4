"""Our pipeline and diffusers', from the same directory, with the same request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_index
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from training.latents import pack


def pipeline_name(path: Path) -> str:
    return str(read_index(path)["_class_name"])


class Pair:
    """``latents`` and ``pixels`` return (ours, theirs)."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        import diffusers

        self.ours: Pipeline = load_pipeline(Checkpoint(path, dtype=dtype))
        self.is_video = pipeline_name(path) == "WanPipeline"
        parts = {"vae": diffusers.AutoencoderKLWan.from_pretrained(path / "vae")} if self.is_video else {}
        self.theirs = getattr(diffusers, pipeline_name(path)).from_pretrained(path, dtype=dtype, **parts)
        self.theirs.set_progress_bar_config(disable=True)

    def latents(self, request: MediaRequest) -> tuple[Tensor, Tensor]:
        """Return both in the form of diffusers' pipeline."""
        ours, theirs = self.ours.denoise(request)["latents"], self._reference(request, "latent")
        return ours if self.is_video else pack(ours), theirs

    def pixels(self, request: MediaRequest) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return values from 0 to 1, ours before rounding to bytes; shape (frames, height, width, 3)."""
        theirs = np.asarray(self._reference(request, "np"))
        pixels_FCHW = self.ours.decoder.pixels(self.ours.denoise(request)).float()
        return pixels_FCHW.permute(0, 2, 3, 1).numpy(), theirs[0] if self.is_video else theirs

    def _reference(self, request: MediaRequest, output_type: str) -> Any:
        output = self.theirs(
            request.prompt,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            max_sequence_length=self.ours.text_encoder.max_tokens,
            generator=torch.Generator().manual_seed(request.seed),
            output_type=output_type,
            **(self._video_options(request) if self.is_video else self._picture_options(request)),
        )
        return output.frames if self.is_video else output.images

    def _video_options(self, request: MediaRequest) -> dict[str, Any]:
        return {
            "negative_prompt": request.negative_prompt,
            "guidance_scale": request.true_cfg_scale,
            "num_frames": request.num_frames,
        }

    def _picture_options(self, request: MediaRequest) -> dict[str, Any]:
        guided = {"true_cfg_scale": request.true_cfg_scale, "negative_prompt": request.negative_prompt}
        return {"guidance_scale": request.guidance_scale, **(guided if request.true_cfg_scale > 1 else {})}


def check_latents(pair: Pair, request: MediaRequest, tolerance: float = 1e-4) -> None:
    ours, theirs = pair.latents(request)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def check_pixels(pair: Pair, request: MediaRequest, tolerance: float = 1e-4) -> None:
    """Check that pixels are equal within ``tolerance``, and bytes except at rounding's midpoints."""
    ours, theirs = pair.pixels(request)
    assert ours.shape == theirs.shape == (request.num_frames, request.height, request.width, 3)
    assert theirs.std() > 10 / 255
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    given, expected = pair.ours.run(request).astype(int), np.round(theirs * 255).astype(int)
    assert np.abs(given - expected).max() <= 1
    assert (given != expected).mean() < 0.001
