"""Tiny checkpoints of Wan for clips from a picture, random weights, in diffusers' layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import multistep, shake, t5, tokenizer
from tests.pipelines.support.checkpoints.tiny import wan_transformer, wan_vae

IMAGE_DIM = 20
VISION_SIZE = 32
VISION_PATCH = 2
"""Patch with the published number of picture tokens: (32 / 2) squared, and one for all."""


def wan_picture(path: Path, *, num_pictures: int = 1) -> Path:
    """Write a Wan 2.1 for clips from a picture; with two, from first and last frame."""
    transformer = _wan_transformer(
        seed=3,
        image_dim=IMAGE_DIM,
        added_kv_proj_dim=4 * 24,
        pos_embed_seq_len=2 * 257 if num_pictures == 2 else None,
    )
    return _wan(path, transformer=transformer, **_clip_vision())


def wan_picture_two_experts(path: Path) -> Path:
    """Write a Wan 2.2 A14B for clips from a picture, which it sees in its latents alone."""
    two = {"transformer": _wan_transformer(seed=3), "transformer_2": _wan_transformer(seed=4)}
    return _wan(path, **two, boundary_ratio=0.9, image_encoder=None, image_processor=None)


wan_first_and_last = partial(wan_picture, num_pictures=2)


def _wan(path: Path, **parts: Any) -> Path:
    import diffusers

    diffusers.WanImageToVideoPipeline(
        tokenizer=tokenizer(512),
        text_encoder=t5("UMT5"),
        vae=wan_vae(),
        scheduler=multistep(),
        **parts,
    ).save_pretrained(path)
    return path


def _wan_transformer(seed: int, **more: Any) -> Any:
    """Return a transformer whose inputs are 4 latent channels, 4 for known frames, and 4 of their values."""
    return wan_transformer(seed, in_channels=12, **more)


def _clip_vision() -> dict[str, Any]:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": IMAGE_DIM, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=VISION_SIZE, patch_size=VISION_PATCH)
    side = {"height": VISION_SIZE, "width": VISION_SIZE}
    processor = CLIPImageProcessor(size=side, crop_size=side)
    return {"image_encoder": shake(CLIPVisionModel(config)), "image_processor": processor}
