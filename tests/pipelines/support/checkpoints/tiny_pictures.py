"""Tiny checkpoints of models with input pictures. A latent value is 8x8 pixels, as published: diffusers' blocks bring
pictures to multiples of 16 for any auto-encoder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.checkpoints import parts, tiny, tiny_models
from tests.pipelines.support.checkpoints.parts import ALPHABET, HIDDEN, chat_tokenizer, flow, shake

PARTS = "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
CHAT_PARTS = "{% for message in messages %}" + PARTS + "{% endfor %}"

flux = partial(tiny.flux, num_stages=4)
flux_kontext = partial(flux, kind="FluxKontextPipeline")
z_image = partial(tiny_models.z_image, num_stages=4)


def flux2_auto_encoder() -> Any:
    vae = parts.flux2_auto_encoder(num_stages=4)
    torch.manual_seed(0)
    vae.bn.running_mean.uniform_(-0.5, 0.5)
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def flux2_dev(path: Path) -> Path:
    """Write a small FLUX.2-dev. The published tokenizer is inside a picture processor, which needs torchvision."""
    from diffusers import Flux2Pipeline

    Flux2Pipeline(
        scheduler=flow(),
        vae=flux2_auto_encoder(),
        text_encoder=mistral3(),
        tokenizer=chat_tokenizer(CHAT_PARTS),
        transformer=tiny_models.flux2_transformer(guidance_embeds=True),
    ).save_pretrained(path)
    return path


def flux2_klein(path: Path, *, is_distilled: bool = True) -> Path:
    return tiny_models.flux2_klein(path, vae=flux2_auto_encoder(), is_distilled=is_distilled)


flux2_klein_base = partial(flux2_klein, is_distilled=False)


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
