"""Tiny checkpoints of pipelines without modular blocks and with a vision language model as encoder: random weights."""

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
    """Write Kandinsky 5's text-to-image. It draws one of seven sizes near 1024x1024."""
    from diffusers import Kandinsky5T2IPipeline

    vae = auto_encoder(4, 4, scaling_factor=0.36)
    Kandinsky5T2IPipeline(vae=vae, transformer=_kandinsky(), **_kandinsky_parts()).save_pretrained(path)
    return path


def kandinsky5_clips(path: Path) -> Path:
    """Write Kandinsky 5's text-to-video: one latent value is 8x8 pixels of 4 frames."""
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
    """Return the other parts. The published tokenizer is inside a picture processor, which needs torchvision."""
    return {
        "text_encoder": qwen_vl(),
        "tokenizer": chat_tokenizer(),
        "text_encoder_2": clip(max_length=CLIP_TOKENS),
        "tokenizer_2": tokenizer(CLIP_TOKENS),
        "scheduler": flow(use_dynamic_shifting=False),
    }


def longcat_image(path: Path) -> Path:
    """Write LongCat-Image, whose encoder first writes a prompt of its own."""
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
    """Write HunyuanImage 2.1, whose guider has the guidance weights; the distilled one has a scale of its own."""
    from diffusers import HunyuanImagePipeline, HunyuanImageTransformer2DModel
    from diffusers.guiders import AdaptiveProjectedMixGuidance
    from transformers import ByT5Tokenizer

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
        vae=_hunyuan_vae(),
        text_encoder=qwen_vl(),
        tokenizer=chat_tokenizer(),
        text_encoder_2=byt5(),
        tokenizer_2=ByT5Tokenizer(),
        transformer=shake(transformer),
        guider=None if is_distilled else AdaptiveProjectedMixGuidance(guidance_scale=3.5),
    ).save_pretrained(path)
    return path


def _hunyuan_vae() -> Any:
    from diffusers import AutoencoderKLHunyuanImage

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
    return shake(vae)


def hunyuan_image_distilled(path: Path) -> Path:
    return hunyuan_image(path, is_distilled=True)


GLM_TOKENS = {
    "image_token": "<|image|>",
    "grid_bos_token": "<sop>",
    "grid_eos_token": "<eop>",
    "bos_token": "<|begin|>",
}
GLM_END = "<|end|>"
GLM_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|begin|><|image|><|end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
GLM_CODES = 64
"""Vision tokens that the language model writes, and the transformer reads."""


def glm_image(path: Path) -> Path:
    """Write GLM-Image, whose language model first samples tokens of the picture."""
    from diffusers import GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    images = GlmImageImageProcessorPil(patch_size=16, temporal_patch_size=1, merge_size=1)
    letters = chat_tokenizer(GLM_CHAT)
    letters.add_special_tokens({"additional_special_tokens": [*GLM_TOKENS.values(), GLM_END]})
    letters.init_kwargs |= GLM_TOKENS
    for name, token in GLM_TOKENS.items():
        setattr(letters, name, token)
    transformer = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=48,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=GLM_CODES,
    )
    GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=GlmImageProcessor(images, letters, chat_template=GLM_CHAT),
        text_encoder=byt5(),
        vision_language_encoder=_glm(letters),
        vae=auto_encoder(4, 4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=shake(transformer),
        scheduler=flow(use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75),
    ).save_pretrained(path)
    return path


def _glm(letters: Any) -> Any:
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    text = {
        "vocab_size": len(letters),
        "vision_vocab_size": GLM_CODES,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "image_size": 64,
        "patch_size": 16,
    }
    vq = {"embed_dim": 16, "num_embeddings": GLM_CODES, "latent_channels": 16}
    names = {"image": GLM_TOKENS["image_token"], "image_start": GLM_TOKENS["bos_token"], "image_end": GLM_END}
    ids = {f"{name}_token_id": letters.convert_tokens_to_ids(token) for name, token in names.items()}
    config = GlmImageConfig(text_config=text, vision_config=vision, vq_config=vq, **ids)
    return shake(GlmImageForConditionalGeneration(config))
