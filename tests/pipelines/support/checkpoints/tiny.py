"""Tiny diffusers directories with random weights, large enough that every part of the model matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import (
    TEXT_TOKENS,
    clip,
    flow,
    multistep,
    shake,
    shifted_auto_encoder,
    t5,
    tokenizer,
)


def flux(
    path: Path,
    kind: str = "FluxPipeline",
    *,
    num_stages: int = 3,
    guidance_embeds: bool = True,
    dynamic_shift: bool = True,
) -> Path:
    """Write a small FLUX.1-dev (schnell: neither guidance nor shift), or ``FluxKontextPipeline`` with the same parts.
    With three stages one latent value is 4x4 pixels."""
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    getattr(diffusers, kind)(
        scheduler=flow() if dynamic_shift else flow(shift=1.0, use_dynamic_shifting=False),
        vae=shifted_auto_encoder(4, num_stages),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5("T5"),
        tokenizer_2=tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def wan(
    path: Path,
    *,
    unipc: bool = True,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    max_tokens: int = TEXT_TOKENS,
) -> Path:
    """Write a small Wan 2.1; with ``boundary_ratio`` Wan 2.2's two transformers, else optionally its per-token time."""
    import diffusers

    diffusers.WanPipeline(
        tokenizer=tokenizer(max_tokens),
        text_encoder=t5("UMT5"),
        vae=wan_vae(),
        scheduler=multistep() if unipc else flow(use_dynamic_shifting=False),
        transformer=wan_transformer(seed=3),
        transformer_2=None if boundary_ratio is None else wan_transformer(seed=4),
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
    ).save_pretrained(path)
    return path


def wan22(path: Path) -> Path:
    return wan(path, boundary_ratio=0.875)


def wan_per_token(path: Path) -> Path:
    """Write a model with prompts of the published length, which is diffusers' default."""
    return wan(path, expand_timesteps=True, max_tokens=512)


def wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    latents = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 1.1, 0.7]}
    return shake(AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1, **latents))


def wan_transformer(seed: int, **changes: Any) -> Any:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 128, "num_layers": 2, "text_dim": 48}
    channels = {"in_channels": 4, "out_channels": 4, "freq_dim": 32, "rope_max_seq_len": 64}
    return shake(WanTransformer3DModel(**{**sizes, **channels, **changes}), seed=seed)
