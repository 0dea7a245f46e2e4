"""The way from pixels to latent values to tokens, read from a directory's configuration (without torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipelines.defaults import check_frames, check_sides
from pipelines.directory import read_config
from pipelines.request import MediaRequest

SIZE_MULTIPLE = 16
"""The reference pipeline refuses other sizes, whatever the auto-encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Pixels, latents and tokens. ``patch`` is (frames, rows, columns) of a token, ``max_positions`` per dim."""

    temporal: int
    spatial: int
    patch: tuple[int, int, int]
    max_positions: int

    @property
    def size_multiple(self) -> int:
        return math.lcm(SIZE_MULTIPLE, self.spatial * self.patch[1], self.spatial * self.patch[2])

    def latent_size(self, request: MediaRequest) -> tuple[int, int, int]:
        """Frames, height and width of the latent. ValueError if the request does not fit the model's grid."""
        check_sides(request.width, request.height, self.size_multiple)
        check_frames(request.num_frames, self.temporal)
        frames = (request.num_frames - 1) // self.temporal + 1
        size = (frames, request.height // self.spatial, request.width // self.spatial)
        if max(self.token_grid(size)) > self.max_positions:
            raise ValueError(
                f"{request.num_frames} frames of {request.width}x{request.height} are too large for the model"
            )
        return size

    def token_grid(self, latent_size: tuple[int, int, int]) -> tuple[int, int, int]:
        frames, height, width = (size // patch for size, patch in zip(latent_size, self.patch, strict=True))
        return frames, height, width


def read_geometry(path: Path) -> Geometry:
    vae, transformer = read_config(path, "vae"), read_config(path, "transformer")
    patch_frames, patch_rows, patch_columns = transformer["patch_size"]
    return Geometry(
        temporal=vae.get("scale_factor_temporal", 4),
        spatial=vae.get("scale_factor_spatial", 8),
        patch=(patch_frames, patch_rows, patch_columns),
        max_positions=transformer.get("rope_max_seq_len", 1024),
    )
