"""Tiny checkpoints of Krea 2, ERNIE-Image, Stable Diffusion 3: published architectures, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.checkpoints.parts import (
    ALPHABET,
    HIDDEN,
    NUM_HEADS,
    chat_tokenizer,
    clip,
    flow,
    flux2_auto_encoder,
    shake,
    shifted_auto_encoder,
    t5,
    tokenizer,
)
from tests.pipelines.support.checkpoints.tiny_qwen import qwen_auto_encoder

PROJECTED = "CLIPTextModelWithProjection"


def krea2(path: Path, *, is_distilled: bool = False) -> Path:
    from diffusers import Krea2Pipeline, Krea2Transformer2DModel

    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=HIDDEN,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    Krea2Pipeline(
        scheduler=flow(),
        vae=qwen_auto_encoder(num_halvings=2),
        text_encoder=_qwen3_vl(num_layers=36),
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
        is_distilled=is_distilled,
    ).save_pretrained(path)
    return path


def krea2_turbo(path: Path) -> Path:
    return krea2(path, is_distilled=True)


def ernie_image(path: Path) -> Path:
    from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel

    transformer = ErnieImageTransformer2DModel(
        hidden_size=64,
        num_attention_heads=NUM_HEADS,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=16,
        out_channels=16,
        text_in_dim=HIDDEN,
        rope_axes_dim=(4, 6, 6),
    )
    ErnieImagePipeline(
        transformer=shake(transformer),
        vae=flux2_auto_encoder(),
        text_encoder=_mistral3(),
        tokenizer=chat_tokenizer(),
        scheduler=flow(use_dynamic_shifting=False),
        pe=None,
        pe_tokenizer=None,
    ).save_pretrained(path)
    return path


def sd3(path: Path, *, dual: tuple[int, ...] = (), qk_norm: str | None = None) -> Path:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=48,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=24,
        dual_attention_layers=dual,
        qk_norm=qk_norm,
    )
    StableDiffusion3Pipeline(
        transformer=shake(transformer),
        scheduler=flow(use_dynamic_shifting=False),
        vae=shifted_auto_encoder(4, 3),
        text_encoder=clip(16, 2, PROJECTED),
        tokenizer=tokenizer(),
        text_encoder_2=clip(16, 2, PROJECTED),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5("T5"),
        tokenizer_3=chat_tokenizer(),
    ).save_pretrained(path)
    return path


def sd35_large(path: Path) -> Path:
    return sd3(path, qk_norm="rms_norm")


def sd35_medium(path: Path) -> Path:
    return sd3(path, qk_norm="rms_norm", dual=(0,))


def _mistral3() -> Any:
    from transformers import Mistral3Config, Mistral3Model

    text = {
        "model_type": "mistral",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(ALPHABET),
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    return shake(Mistral3Model(Mistral3Config(text_config=text, vision_config=vision)))


def _qwen3_vl(*, num_layers: int) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    rope = {"mrope_section": [4, 2, 2], "rope_type": "default", "mrope_interleaved": True, "rope_theta": 1e6}
    text = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": rope,
        "vocab_size": len(ALPHABET),
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(0)
    return shake(Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision)))


CONTENT = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"


def ideogram4(path: Path) -> Path:
    from diffusers import Ideogram4Pipeline, Ideogram4Transformer2DModel

    sizes = {"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": NUM_HEADS}
    inner = {"intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 13 * HIDDEN, "mrope_section": (4, 2, 2)}
    Ideogram4Pipeline(
        scheduler=flow(use_dynamic_shifting=False),
        vae=flux2_auto_encoder(),
        text_encoder=_qwen3_vl(num_layers=36),
        tokenizer=chat_tokenizer(CONTENT),
        transformer=shake(Ideogram4Transformer2DModel(**sizes, **inner)),
        unconditional_transformer=shake(Ideogram4Transformer2DModel(**sizes, **inner), seed=4),
    ).save_pretrained(path)
    return path
