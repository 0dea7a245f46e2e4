"""Tiny checkpoints of the published architectures, random weights, in diffusers' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.tiny import ALPHABET, shake, tokenizer

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_TOKENS = 40
HIDDEN = 32
NUM_HEADS = 4


def flux2_klein(path: Path) -> Path:
    from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=3 * HIDDEN,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    Flux2KleinPipeline(
        scheduler=_flow(),
        vae=_flux2_vae(),
        text_encoder=_qwen3(num_layers=28),
        tokenizer=_chat_tokenizer(),
        transformer=shake(transformer),
        is_distilled=True,
    ).save_pretrained(path)
    return path


def qwen_image(path: Path) -> Path:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    QwenImagePipeline(
        scheduler=_flow(),
        vae=shake(vae),
        text_encoder=_qwen_vl(),
        tokenizer=_chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def z_image(path: Path) -> Path:
    from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=6,
        n_kv_heads=6,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    stages = {"block_out_channels": (8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = AutoencoderKL(**stages, **kinds, latent_channels=16, scaling_factor=0.36, shift_factor=0.12)
    ZImagePipeline(
        scheduler=_flow(),
        vae=shake(vae),
        text_encoder=_qwen3(num_layers=2).model,
        tokenizer=_chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def _flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def _flux2_vae() -> Any:
    from diffusers import AutoencoderKLFlux2

    stages = {"block_out_channels": (8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = AutoencoderKLFlux2(**stages, **kinds, latent_channels=4)
    return shake(vae)


def _chat_tokenizer() -> Any:
    letters = tokenizer()
    letters.chat_template, letters.model_max_length = CHAT, 1024
    return letters


def _qwen3(*, num_layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=len(ALPHABET), **sizes, head_dim=16, num_hidden_layers=num_layers)
    return shake(Qwen3ForCausalLM(config))


def _qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
    text = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": rope,
        "rope_theta": 1e6,
        "vocab_size": len(ALPHABET),
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    torch.manual_seed(0)
    return shake(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)))
