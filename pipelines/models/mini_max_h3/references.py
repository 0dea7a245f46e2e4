"""References of MiniMax-H3: pictures and clips that the prompt names, in diffusers' form and as blank values."""

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
SOUND_STRIDES = (2, 4, 4, 5, 5)
"""Strides of the sound's auto-encoder, whose product are the samples of a latent (diffusers' class)."""
WITH_SOUND = " with sound"
CANVAS = {"canvas_short_edge": 768, "canvas_max_pixels": 768 * 1344, "reference_image_short_edge": 2048}
"""Sizes in pixels that references are scaled to, unless the folder's index has others (diffusers' blocks)."""


def kind_of(kind: str, *, has_sound: bool) -> str:
    """Return the description of a reference for ranks."""
    return f"{kind}{WITH_SOUND}" if has_sound else kind


def references_of(pictures: InputPictures) -> list[MiniMaxH3Reference]:
    """Return the pictures in their order, then the clips, with the sound that they have."""
    images = [MiniMaxH3ImageReference(image=one.on_white()) for one in pictures.pictures]
    return [*images, *map(_clip_reference, pictures.videos)]


def _clip_reference(video: InputVideo) -> MiniMaxH3VideoReference:
    """Return the clip, which is at the model's rate (``Defaults.video_fps``), diffusers' default."""
    pixels = np.frombuffer(video.data, dtype=np.uint8).reshape(video.num_frames, video.height, video.width, 3)
    if (sound := video.sound) is None:
        return MiniMaxH3VideoReference(frames=pixels)
    audio = torch.frombuffer(bytearray(sound.data), dtype=torch.float32).reshape(sound.num_channels, -1)
    return MiniMaxH3VideoReference(frames=pixels, audio=audio, sample_rate=sound.rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSizes:
    """Sizes of a request's encoded references. Pictures are taken to have the shape of the result."""

    request: MediaRequest
    """Says how many input pictures and frames there are, but not the shape of pictures."""
    vae: Config
    """The auto-encoder's configuration."""
    audio_vae: Config
    """The configuration of the sound's auto-encoder."""
    index: Mapping[str, Any]
    """The folder's index, which may have settings of the references' sizes (``CANVAS``)."""
    multiple: int
    """Divisor of sizes in pixels."""
    rate: int
    """The model's own frames a second."""
    sound_rate: int
    """Samples a second that the sound's auto-encoder takes."""

    @property
    def num_frames(self) -> int:
        """Frames that the model makes, of which the request may want fewer."""
        return int(align_num_frames(self.request.num_frames, self._clip_length, self._per_chunk))

    def blank_values(self) -> dict[str, Any]:
        """Return zeros for pictures, then for the clips, and what else the preparation of a job reads."""
        clips = [(self._num_latents(number), *self._canvas) for number in self._lengths]
        sizes = [(1, *self._picture_size)] * self.request.num_pictures + clips
        unit = math.prod(self.vae.get("spatial_downsample_factors", (2, 2, 2, 2)))
        channels = self.vae.get("latent_channels", 24)
        shapes = ((1, channels, frames, height // unit, width // unit) for frames, height, width in sizes)
        sounds = self.request.sound_samples or (0,) * len(clips)
        kinds = [kind_of("video", has_sound=samples > 0) for samples in sounds]
        rows = [self._num_sound_rows(samples) for samples in sounds if samples]
        sound_channels = self.audio_vae.get("latent_channels", 32)
        return {
            "condition_latents": [torch.zeros(shape) for shape in shapes],
            "audio_condition_latents": [torch.zeros(number, sound_channels) for number in rows],
            "normalized_references": ["image"] * self.request.num_pictures + kinds,
            "num_frames": self.num_frames,
        }

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of references in the prompt. A clip has tokens for pairs of frames, at two frames a second."""
        seen = (math.ceil(number / (self.rate // SEEN_A_SECOND)) for number in self._lengths)
        num_pairs = sum(math.ceil(number / 2) for number in seen)
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
    def _lengths(self) -> list[int]:
        """Frames of each clip, up to the length of the result."""
        numbers = (self.request.num_video_frames, *self.request.further_video_frames)
        return [min(self.num_frames, number) for number in numbers if number]

    def _num_latents(self, num_shown: int) -> int:
        """Return the latent frames of a clip of ``num_shown`` frames, the last of which may be left out."""
        whole = max(1, (num_shown - self._per_chunk) // self._clip_length) * self._clip_length + self._per_chunk
        num_chunks = math.ceil(min(num_shown, whole) / self._clip_length)
        return num_chunks * self._per_chunk - int(self.vae.get("token_drop", TOKEN_DROP))

    def _num_sound_rows(self, num_samples: int) -> int:
        """Return the rows of both channels of a sound, which is cut to the length of the result."""
        longest = int(self.num_frames / self.rate * self.sound_rate)
        return 2 * math.ceil(min(num_samples, longest) / math.prod(self.audio_vae.get("encoder_rates", SOUND_STRIDES)))

    @property
    def _picture_size(self) -> tuple[int, int]:
        """Height and width of a picture."""
        sides = self.request.height, self.request.width
        scale = self._setting("reference_image_short_edge") / min(sides)
        height, width = (max(1, round(side * scale / self.multiple)) * self.multiple for side in sides)
        return height, width

    @property
    def _canvas(self) -> tuple[int, int]:
        """Height and width of the clips."""
        limits = (self._setting(name) for name in ("canvas_short_edge", "canvas_max_pixels"))
        size: tuple[int, int] = resolve_canvas_size(self.request.width, self.request.height, self.multiple, *limits)
        return size

    def _setting(self, name: str) -> int:
        return int(self.index.get(name, CANVAS[name]))
