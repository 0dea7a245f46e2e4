"""The way from pixels to latent values, read from a folder's configuration (without torch)."""

from __future__ import annotations

from pathlib import Path

from pipelines.directory import read_config


def vae_scale(path: Path) -> int:
    """Pixels per latent value along height and width: the auto-encoder halves once between two of its stages."""
    stages: int = len(read_config(path, "vae")["block_out_channels"])
    return 1 << (stages - 1)


def clip_vae_scale(path: Path, num_halvings: int) -> int:
    """The same for auto-encoders of clips, which halve as often as they say; ``num_halvings`` where they do not."""
    said = read_config(path, "vae").get("temperal_downsample")
    return 1 << (num_halvings if said is None else len(said))
