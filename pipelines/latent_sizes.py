"""Sizes of latents from sizes in pixels and a folder's configuration, without torch."""

from __future__ import annotations

from pathlib import Path

from pipelines.directory import read_config
from pipelines.request import MediaRequest

STAGES = ("block_out_channels", "encoder_block_out_channels")
"""Keys of stages in auto-encoders' configurations; tiny ones may have the second alone."""


def vae_scale(path: Path) -> int:
    """Return pixels per latent value along height and width: the auto-encoder halves between stages."""
    vae = read_config(path, "vae")
    return 1 << (len(vae.get(STAGES[0]) or vae[STAGES[1]]) - 1)


def clip_vae_scale(path: Path, num_halvings: int) -> int:
    """Return the scale of a clip's auto-encoder by its configured halvings, or else ``num_halvings``."""
    halvings = read_config(path, "vae").get("temperal_downsample")
    return 1 << (num_halvings if halvings is None else len(halvings))


def space_time_scales(path: Path) -> tuple[int, int]:
    """Return pixels per side, and frames, of one latent value."""
    vae = read_config(path, "vae")
    return vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)


def latent_sizes(request: MediaRequest, scales: tuple[int, int]) -> tuple[int, int, int]:
    """Return latent frames, rows and columns of a clip; ``scales`` are as in ``space_time_scales``."""
    spatial, temporal = scales
    return 1 + (request.num_frames - 1) // temporal, request.height // spatial, request.width // spatial
