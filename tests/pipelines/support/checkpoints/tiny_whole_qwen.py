"""Tiny checkpoints of pipelines without modular blocks whose prompts Qwen2.5-VL reads: random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import (
    HIDDEN,
    auto_encoder,
    chat_tokenizer,
    clip,
    flow,
    shake,
    shifted_auto_encoder,
    tokenizer,
)
from tests.pipelines.support.checkpoints.tiny_hunyuan import byt5
from tests.pipelines.support.checkpoints.tiny_qwen import qwen_vl

CLIP_TOKENS = 77


def kandinsky5(path: Path) -> Path:
    """Kandinsky 5's text-to-image. It draws one of seven sizes near 1024x1024."""
    from diffusers import Kandinsky5T2IPipeline

    vae = auto_encoder(4, 4, scaling_factor=0.36)
    Kandinsky5T2IPipeline(vae=vae, transformer=_kandinsky(), **_kandinsky_parts()).save_pretrained(path)
    return path


def kandinsky5_clips(path: Path) -> Path:
    """Kandinsky 5's text-to-video: one latent value is 8x8 pixels of 4 frames."""
    from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5T2VPipeline

    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.48,
    )
    transformer = _kandinsky(visual_cond=True)
    Kandinsky5T2VPipeline(vae=shake(vae), transformer=transformer, **_kandinsky_parts()).save_pretrained(path)
    return path


def _kandinsky(**settings: Any) -> Any:
    from diffusers import Kandinsky5Transformer3DModel

    transformer = Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=HIDDEN,
        in_text_dim2=HIDDEN,
        time_dim=16,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        **settings,
    )
    return shake(transformer)


def _kandinsky_parts() -> dict[str, Any]:
    """The published tokenizer is inside a processor of pictures, which needs torchvision."""
    return {
        "text_encoder": qwen_vl(),
        "tokenizer": chat_tokenizer(),
        "text_encoder_2": clip(max_length=CLIP_TOKENS),
        "tokenizer_2": tokenizer(CLIP_TOKENS),
        "scheduler": flow(use_dynamic_shifting=False),
    }


def longcat_image(path: Path) -> Path:
    """LongCat-Image, whose encoder writes a prompt of its own first."""
    from diffusers import LongCatImagePipeline, LongCatImageTransformer2DModel

    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=[4, 6, 6],
    )
    LongCatImagePipeline(
        scheduler=flow(),
        vae=shifted_auto_encoder(16, 4),
        text_encoder=qwen_vl(),
        tokenizer=chat_tokenizer(),
        text_processor=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def hunyuan_image(path: Path, *, is_distilled: bool = False) -> Path:
    """HunyuanImage 2.1, whose guider has the weights of guidance; the distilled one has a scale of its own."""
    from diffusers import AutoencoderKLHunyuanImage, HunyuanImagePipeline, HunyuanImageTransformer2DModel
    from diffusers.guiders import AdaptiveProjectedMixGuidance
    from transformers import ByT5Tokenizer

    vae = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=16,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.75,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    transformer = HunyuanImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        guidance_embeds=is_distilled,
        text_embed_dim=HIDDEN,
        text_embed_2_dim=48,
        rope_axes_dim=(8, 8),
    )
    HunyuanImagePipeline(
        scheduler=flow(use_dynamic_shifting=False, shift=5.0),
        vae=shake(vae),
        text_encoder=qwen_vl(),
        tokenizer=chat_tokenizer(),
        text_encoder_2=byt5(),
        tokenizer_2=ByT5Tokenizer(),
        transformer=shake(transformer),
        guider=None if is_distilled else AdaptiveProjectedMixGuidance(guidance_scale=3.5),
    ).save_pretrained(path)
    return path


def hunyuan_image_distilled(path: Path) -> Path:
    return hunyuan_image(path, is_distilled=True)
