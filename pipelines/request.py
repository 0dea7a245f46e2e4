"""What a client asked for, checked and frozen. From here on there is no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.caching import CacheMode

MediaKind = Literal["image", "video"]
ServiceTier = Literal["flex", "default", "priority"]
MetadataLevel = Literal["full", "seed", "none"]
"""What a file says of its request: all settings, model and seed alone, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """An adapter of the model by its name, and how much of it."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRequest:
    """One picture or one clip. ``width`` and ``height`` in pixels; ``num_frames`` is 1 and ``fps`` 0 for pictures.

    ``guidance_scale`` is the distilled scale that guidance-distilled models take as an input; ``true_cfg_scale`` above
    1 runs a second branch with ``negative_prompt`` (classifier-free guidance, Ho & Salimans 2022, arXiv:2207.12598).
    Where nothing is said (None) it is what the pipeline takes by itself, which need not be the empty prompt.
    ``preview_steps`` are the steps (1 = after the first) whose latents are wanted as previews.
    ``num_pictures`` come along beside it, and a mask if it ``has_mask`` (``pictures.InputPictures``: the encoder alone
    gets them). ``strength`` in (0, 1] is how much of the picture is painted anew (image-to-image; None: the model's).
    The picture comes out as ``num_layers`` with opacity, from the lowest to the highest (0: as one, which is opaque).
    ``loras`` are the adapters that its weights get, of those that the model is served with. ``cache`` says how many
    steps take the predictions of the step before them again (``pipelines.caching``). ``sound`` says whether the clip
    gets one (None: as the model does by itself).
    ``service_tier`` says how urgent it is beside others, and ``deadline_s`` how long its client waits, in seconds from
    when it came (None: as long as it takes), ``waited_s`` of which are over as it is handed on. ``key`` is whose it is:
    the hash of an API key, empty for everybody; ``weight`` is that one's share beside others.
    """

    request_id: str
    model: str
    kind: MediaKind
    prompt: str
    negative_prompt: str | None = None
    width: int
    height: int
    num_frames: int = 1
    fps: int = 0
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float
    seed: int
    preview_steps: tuple[int, ...] = ()
    num_pictures: int = 0
    has_mask: bool = False
    strength: float | None = None
    num_layers: int = 0
    loras: tuple[Lora, ...] = ()
    cache: CacheMode = "off"
    sound: bool | None = None
    service_tier: ServiceTier = "default"
    deadline_s: float | None = None
    waited_s: float = 0.0
    key: str = ""
    weight: float = 1.0
