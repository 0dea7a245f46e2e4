"""A client's request, checked and frozen. From here on there is no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.caching import CacheMode

MediaKind = Literal["image", "video"]
ServiceTier = Literal["flex", "default", "priority"]
MetadataLevel = Literal["full", "seed", "none"]
"""Metadata in a file: all settings, model and seed only, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """An adapter of the model by its name, and its scale."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRequest:
    """One picture or one clip."""

    request_id: str
    model: str
    kind: MediaKind
    prompt: str
    negative_prompt: str | None = None
    """Prompt of the second branch; None: the pipeline's default, which may differ from the empty prompt."""
    width: int
    """Pixels, as is ``height``."""
    height: int
    num_frames: int = 1
    """1 for pictures, whose ``fps`` is 0."""
    fps: int = 0
    num_inference_steps: int
    guidance_scale: float
    """Distilled scale, an input of guidance-distilled models."""
    true_cfg_scale: float
    """Above 1: a second branch with ``negative_prompt`` (Ho & Salimans 2022, arXiv:2207.12598)."""
    seed: int
    preview_steps: tuple[int, ...] = ()
    """Steps (1 = after the first) whose latents become previews."""
    num_pictures: int = 0
    """Input pictures, with a mask if ``has_mask`` (``pictures.InputPictures``, sent to the encoder only)."""
    has_mask: bool = False
    strength: float | None = None
    """Share of the picture to repaint, in (0, 1]; None: the model's default."""
    num_layers: int = 0
    """Layers with opacity, from lowest to highest (0: one opaque picture)."""
    loras: tuple[Lora, ...] = ()
    """Adapters for this request, among those served with the model."""
    cache: CacheMode = "off"
    """Which steps reuse the previous prediction (``pipelines.caching``)."""
    sound: bool | None = None
    """Whether the clip has sound (None: the model's default)."""
    service_tier: ServiceTier = "default"
    deadline_s: float | None = None
    """Seconds from arrival that the client waits (None: no limit)."""
    waited_s: float = 0.0
    """Seconds since arrival when the request is handed on."""
    key: str = ""
    """Hash of the API key, empty without keys; ``weight`` is its share."""
    weight: float = 1.0
