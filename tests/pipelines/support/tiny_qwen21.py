"""Qwen-Image 2.1 in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.pipelines.support.tiny import ALPHABET, shake
from tests.pipelines.support.tiny_models import HIDDEN
from tests.pipelines.support.tiny_pictures import flow
from tests.pipelines.support.tiny_qwen import VISION, vision_tokenizer


def qwen21(path: Path) -> Path:
    from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel

    torch.manual_seed(0)
    sizes = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 2, 2], "num_res_blocks": 1}
    vae = AutoencoderKLQwenImage21(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        context_in_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )
    parts = {"scheduler": flow(), "vae": shake(vae), "transformer": shake(transformer), "text_encoder": qwen3_vl()}
    for name, part in parts.items():
        part.save_pretrained(path / name)
    classes = {name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()}
    index = {"_class_name": "QwenImage21Pipeline", **classes, "processor": ["transformers", "Qwen3VLProcessor"]}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


class Qwen3Processor:
    """What ``Qwen3VLProcessor`` does with words; it needs torchvision even to be made."""

    def __init__(self) -> None:
        self.tokenizer = vision_tokenizer()

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        return [self.tokenizer.encode(message["content"][0]["text"]) for message in messages]

    def __call__(self, *, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    rope = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 3, 3]}
    words = {"vocab_size": len(ALPHABET) + len(VISION), "hidden_size": HIDDEN, "intermediate_size": 64}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    vision = {**eyes, "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4}
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config={**words, **heads, "rope_parameters": rope}, vision_config=vision)
    return shake(Qwen3VLForConditionalGeneration(config))
