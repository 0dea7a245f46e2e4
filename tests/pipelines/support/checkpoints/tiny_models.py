"""Tiny checkpoints of the published architectures, random weights, in diffusers' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints import tiny_qwen
from tests.pipelines.support.checkpoints.parts import (
    HIDDEN,
    NUM_HEADS,
    chat_tokenizer,
    flow,
    flux2_auto_encoder,
    qwen3,
    shake,
    shifted_auto_encoder,
)


def flux2_transformer(*, guidance_embeds: bool) -> Any:
    from diffusers import Flux2Transformer2DModel

    return shake(
        Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=NUM_HEADS,
            joint_attention_dim=3 * HIDDEN,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        )
    )


def flux2_klein(path: Path, *, vae: Any = None, is_distilled: bool = True) -> Path:
    from diffusers import Flux2KleinPipeline

    Flux2KleinPipeline(
        scheduler=flow(),
        vae=vae or flux2_auto_encoder(),
        text_encoder=qwen3(num_layers=28),
        tokenizer=chat_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=False),
        is_distilled=is_distilled,
    ).save_pretrained(path)
    return path


def qwen_image(path: Path) -> Path:
    """Write a small Qwen-Image; one latent value is 4x4 pixels."""
    return tiny_qwen.qwen(path, vae=tiny_qwen.qwen_auto_encoder(num_halvings=2))


def z_image(path: Path, *, num_stages: int = 3) -> Path:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=6,
        n_kv_heads=6,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    ZImagePipeline(
        scheduler=flow(),
        vae=shifted_auto_encoder(16, num_stages),
        text_encoder=qwen3(num_layers=2).model,
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path
