"""Parts with random weights that several tiny checkpoints share."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn

TEXT_TOKENS = 24
ALPHABET = ["<pad>", *string.printable, "<eos>"]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HIDDEN, NUM_HEADS = 32, 4
CHANNELS = {3: (8, 16, 16), 4: (8, 8, 16, 16)}
"""Channels of an auto-encoder's stages, by number: one latent value is 4x4 pixels, or 8x8 as published."""


def shake(model: nn.Module, seed: int = 3) -> nn.Module:
    """Replace fresh weights, which are too small or zero in places and would hide faults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.2 / parameter[0].numel() ** 0.5))
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model.eval()


def tokenizer(max_length: int = TEXT_TOKENS, chat: str | None = None) -> Any:
    """Return a tokenizer with one token a character; ``chat`` is the template of messages."""
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(ALPHABET)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    letters.post_processor = processors.TemplateProcessing(
        single=["$A", "<eos>"], special_tokens=[("<eos>", ALPHABET.index("<eos>"))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token=" ", model_max_length=max_length
    )
    made.chat_template = chat
    return made


def chat_tokenizer(chat: str = CHAT) -> Any:
    return tokenizer(1024, chat)


def clip(width: int = HIDDEN, num_layers: int = 1, kind: str = "CLIPTextModel", max_length: int = TEXT_TOKENS) -> Any:
    """Return a ``CLIPTextModel`` or ``CLIPTextModelWithProjection``."""
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers}
    ids = {"vocab_size": len(ALPHABET), "eos_token_id": ALPHABET.index("<eos>"), "pad_token_id": 0, "bos_token_id": 1}
    lengths = {"max_position_embeddings": max_length, "projection_dim": 32}
    config = transformers.CLIPTextConfig(**sizes, **ids, **lengths, num_attention_heads=2)
    return shake(getattr(transformers, kind)(config))


def t5(name: str) -> Any:
    """Return a ``T5`` or ``UMT5`` encoder."""
    import transformers

    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(ALPHABET), **sizes, feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1
    )
    return shake(getattr(transformers, f"{name}EncoderModel")(config))


def qwen3(*, num_layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=len(ALPHABET), **sizes, head_dim=16, num_hidden_layers=num_layers)
    return shake(Qwen3ForCausalLM(config))


def flow(**changes: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, "use_dynamic_shifting": True, **changes})


def multistep() -> Any:
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def auto_encoder(num_channels: int, num_stages: int, kind: str = "AutoencoderKL", **settings: Any) -> Any:
    """Return an auto-encoder with ``num_channels`` of latents; ``kind`` may be ``AutoencoderKLFlux2``."""
    import diffusers

    down, up = ("DownEncoderBlock2D",) * num_stages, ("UpDecoderBlock2D",) * num_stages
    stages = {"block_out_channels": CHANNELS[num_stages], "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": down, "up_block_types": up}
    return shake(getattr(diffusers, kind)(**stages, **kinds, latent_channels=num_channels, **settings))


def shifted_auto_encoder(num_channels: int, num_stages: int) -> Any:
    return auto_encoder(num_channels, num_stages, scaling_factor=0.36, shift_factor=0.12)


def flux2_auto_encoder(num_stages: int = 3) -> Any:
    return auto_encoder(4, num_stages, "AutoencoderKLFlux2")


def saved(parts: Mapping[str, Any], path: Path) -> dict[str, list[str]]:
    """Save each part in a folder of its name. Return the index entries of their classes."""
    for name, part in parts.items():
        part.save_pretrained(path / name)
    return {name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()}


def places(entries: Mapping[str, list[str]], path: Path) -> dict[str, Any]:
    """Return the entries of a modular index, which also has each part's place."""
    return {
        name: [*entry, {"pretrained_model_name_or_path": str(path), "subfolder": name, "type_hint": entry}]
        for name, entry in entries.items()
    }
