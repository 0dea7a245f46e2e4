"""What a client asked for, checked and frozen. From here on there is no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRequest:
    """One picture or one clip. ``width`` and ``height`` in pixels; ``num_frames`` is 1 and ``fps`` 0 for pictures.

    ``guidance_scale`` is the distilled scale that guidance-distilled models take as an input; ``true_cfg_scale`` above
    1 runs a second branch with ``negative_prompt`` (classifier-free guidance, Ho & Salimans 2022, arXiv:2207.12598).
    ``preview_steps`` are the steps (1 = after the first) whose latents are wanted as previews.
    """

    request_id: str
    model: str
    kind: MediaKind
    prompt: str
    negative_prompt: str = ""
    width: int
    height: int
    num_frames: int = 1
    fps: int = 0
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float
    seed: int
    preview_steps: tuple[int, ...] = ()
