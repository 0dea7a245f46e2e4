"""What most models of pictures, and of clips, have in common; each says what it does otherwise."""

from __future__ import annotations

from dataclasses import replace

from pipelines.defaults import Defaults

PICTURE = Defaults(
    kind="image",
    width=1024,
    height=1024,
    num_frames=1,
    fps=0,
    num_inference_steps=50,
    guidance_scale=0.0,
    true_cfg_scale=1.0,
    size_multiple=16,
    frame_multiple=1,
    max_pixels=2048 * 2048,
    max_frames=1,
    max_steps=100,
)
CLIP = Defaults(
    kind="video",
    width=1280,
    height=720,
    num_frames=121,
    fps=24,
    num_inference_steps=50,
    guidance_scale=0.0,
    true_cfg_scale=5.0,
    size_multiple=16,
    frame_multiple=4,
    max_pixels=1280 * 720,
    max_frames=121,
    max_steps=100,
)


def distilled(base: Defaults, num_inference_steps: int) -> Defaults:
    """Those of a model that does in so few steps, and without a second prompt, what ``base`` does."""
    return replace(base, num_inference_steps=num_inference_steps, true_cfg_scale=1.0)
