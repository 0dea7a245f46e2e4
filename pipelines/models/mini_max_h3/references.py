"""References of MiniMax-H3: pictures and a clip that the prompt names, in diffusers' form and as blank values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import align_num_frames, resolve_canvas_size
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3ImageReference,
    MiniMaxH3Reference,
    MiniMaxH3VideoReference,
)

from pipelines.models.spec import Config
from pipelines.request import InputPictures, InputVideo, MediaRequest

CLIP_LENGTH, TOKEN_DROP = 17, 3
"""Frames that the auto-encoder takes at once, and latent frames that it drops at the end."""
SEEN_A_SECOND = 2
"""Frames of a clip that the text encoder sees."""
EYE = 32
"""Pixels a side that the text encoder sees as one token: patches of 16, merged two by two (Qwen3-VL)."""
CANVAS = {"canvas_short_edge": 768, "canvas_max_pixels": 768 * 1344, "reference_image_short_edge": 2048}
"""Sizes in pixels that references are scaled to, unless the folder's index has others (diffusers' blocks)."""


def references_of(pictures: InputPictures) -> list[MiniMaxH3Reference]:
    """Return the pictures in their order, then the clip, without sound."""
    images = [MiniMaxH3ImageReference(image=one.on_white()) for one in pictures.pictures]
    return images if pictures.video is None else [*images, _clip_reference(pictures.video)]


def _clip_reference(video: InputVideo) -> MiniMaxH3VideoReference:
    """Return the clip, which is at the model's rate (``Defaults.video_fps``), diffusers' default."""
    pixels = np.frombuffer(video.data, dtype=np.uint8).reshape(video.num_frames, video.height, video.width, 3)
    return MiniMaxH3VideoReference(frames=pixels)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSizes:
    """Sizes of a request's encoded references. Pictures are taken to have the shape of the result."""

    request: MediaRequest
    """Says how many pictures and frames came along, but not the shape of pictures."""
    vae: Config
    """The auto-encoder's configuration."""
    index: Mapping[str, Any]
    """The folder's index, which may have settings of the references' sizes (``CANVAS``)."""
    multiple: int
    """Divisor of sizes in pixels."""
    rate: int
    """The model's own frames a second."""

    @property
    def num_frames(self) -> int:
        """Frames that the model makes, of which the request may want fewer."""
        return int(align_num_frames(self.request.num_frames, self._clip_length, self._per_chunk))

    def blank_values(self) -> dict[str, Any]:
        """Return zeros for pictures, then for the clip, and what else the preparation of a job reads."""
        has_clip = self.request.num_video_frames > 0
        sizes = [(1, *self._picture_size)] * self.request.num_pictures + [(self._num_latents, *self._canvas)] * has_clip
        unit = math.prod(self.vae.get("spatial_downsample_factors", (2, 2, 2, 2)))
        channels = self.vae.get("latent_channels", 24)
        shapes = ((1, channels, frames, height // unit, width // unit) for frames, height, width in sizes)
        return {
            "condition_latents": [torch.zeros(shape) for shape in shapes],
            "audio_condition_latents": [],
            "normalized_references": ["image"] * self.request.num_pictures + ["video"] * has_clip,
            "num_frames": self.num_frames,
        }

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of references in the prompt. Those of a clip are of pairs of frames, two frames a second."""
        num_pairs = math.ceil(math.ceil(self._num_shown / (self.rate // SEEN_A_SECOND)) / 2)
        sizes = [self._picture_size] * self.request.num_pictures + [self._canvas] * num_pairs
        return sum((height // EYE) * (width // EYE) for height, width in sizes)

    @property
    def _clip_length(self) -> int:
        return int(self.vae.get("clip_length", CLIP_LENGTH))

    @property
    def _per_chunk(self) -> int:
        """Latent frames of ``_clip_length`` frames."""
        return math.ceil(self._clip_length / math.prod(self.vae.get("temporal_downsample_factors", (1, 2, 2, 1))))

    @property
    def _num_shown(self) -> int:
        """Frames of the clip, up to the length of the result; 0 without a clip."""
        return min(self.num_frames, self.request.num_video_frames)

    @property
    def _num_latents(self) -> int:
        """Latent frames of the clip, whose last frames may be left out."""
        whole = max(1, (self._num_shown - self._per_chunk) // self._clip_length) * self._clip_length + self._per_chunk
        num_chunks = math.ceil(min(self._num_shown, whole) / self._clip_length)
        return num_chunks * self._per_chunk - int(self.vae.get("token_drop", TOKEN_DROP))

    @property
    def _picture_size(self) -> tuple[int, int]:
        """Height and width of a picture."""
        sides = self.request.height, self.request.width
        scale = self._setting("reference_image_short_edge") / min(sides)
        height, width = (max(1, round(side * scale / self.multiple)) * self.multiple for side in sides)
        return height, width

    @property
    def _canvas(self) -> tuple[int, int]:
        """Height and width of the clip."""
        limits = (self._setting(name) for name in ("canvas_short_edge", "canvas_max_pixels"))
        size: tuple[int, int] = resolve_canvas_size(self.request.width, self.request.height, self.multiple, *limits)
        return size

    def _setting(self, name: str) -> int:
        return int(self.index.get(name, CANVAS[name]))
