"""Tiny checkpoints of models that take pictures. As published, a latent value is 8x8 pixels: diffusers' blocks bring
pictures to multiples of 16 whatever the auto-encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.tiny import ALPHABET, clip, shake, t5, tokenizer
from tests.pipelines.support.tiny_models import HIDDEN
from tests.pipelines.support.tiny_models import _chat_tokenizer as chat_tokenizer
from tests.pipelines.support.tiny_models import _qwen3 as qwen3

PARTS = "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
CHAT_PARTS = "{% for message in messages %}" + PARTS + "{% endfor %}"

STAGES = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
KINDS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def auto_encoder(num_channels: int) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    scales = {"scaling_factor": 0.36, "shift_factor": 0.12}
    return shake(AutoencoderKL(**STAGES, **KINDS, **scales, latent_channels=num_channels))


def flow(**changes: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, "use_dynamic_shifting": True, **changes})


def flux(path: Path, kind: str = "FluxPipeline") -> Path:
    """FLUX.1-dev, or ``FluxKontextPipeline``, whose parts are the same."""
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    getattr(diffusers, kind)(
        scheduler=flow(),
        vae=auto_encoder(4),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5("T5"),
        tokenizer_2=tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def flux_kontext(path: Path) -> Path:
    return flux(path, "FluxKontextPipeline")


def flux2_auto_encoder() -> Any:
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    vae = shake(AutoencoderKLFlux2(**STAGES, **KINDS, latent_channels=4))
    vae.bn.running_mean.uniform_(-0.5, 0.5)
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def flux2_transformer(*, guidance_embeds: bool) -> Any:
    from diffusers import Flux2Transformer2DModel

    return shake(
        Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=3 * HIDDEN,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        )
    )


def flux2_dev(path: Path) -> Path:
    from diffusers import Flux2Pipeline

    Flux2Pipeline(
        scheduler=flow(),
        vae=flux2_auto_encoder(),
        text_encoder=mistral3(),
        tokenizer=parts_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=True),
    ).save_pretrained(path)
    return path


def flux2_klein(path: Path, *, is_distilled: bool = True) -> Path:
    from diffusers import Flux2KleinPipeline

    Flux2KleinPipeline(
        scheduler=flow(),
        vae=flux2_auto_encoder(),
        text_encoder=qwen3(num_layers=28),
        tokenizer=chat_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=False),
        is_distilled=is_distilled,
    ).save_pretrained(path)
    return path


def flux2_klein_base(path: Path) -> Path:
    return flux2_klein(path, is_distilled=False)


def mistral3() -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text = MistralConfig(
        vocab_size=len(ALPHABET), hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=31, **heads
    )
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, patch_size=4, image_size=16
    )
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)
    return shake(Mistral3ForConditionalGeneration(config))


def parts_tokenizer() -> Any:
    """For messages in parts. The published one is inside a processor of pictures, which needs torchvision."""
    letters = chat_tokenizer()
    letters.chat_template = CHAT_PARTS
    return letters


def z_image(path: Path) -> Path:
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
        vae=auto_encoder(16),
        text_encoder=qwen3(num_layers=2).model,
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path
