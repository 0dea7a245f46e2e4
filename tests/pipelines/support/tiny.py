"""Tiny diffusers directories with random weights, large enough that every part of the model matters."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn

TEXT_TOKENS = 24
ALPHABET = ["<pad>", *string.printable, "<eos>"]


def shake(model: nn.Module, seed: int = 3) -> nn.Module:
    """Fresh weights are too small or zero in places and would hide faults in attention, modulation and norms."""
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


def tokenizer() -> Any:
    """One token a character."""
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(ALPHABET)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    letters.post_processor = processors.TemplateProcessing(
        single=["$A", "<eos>"], special_tokens=[("<eos>", ALPHABET.index("<eos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token=" ", model_max_length=TEXT_TOKENS
    )


def clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(ALPHABET), "eos_token_id": ALPHABET.index("<eos>"), "pad_token_id": 0, "bos_token_id": 1}
    return shake(CLIPTextModel(CLIPTextConfig(**sizes, **ids, max_position_embeddings=TEXT_TOKENS)))


def t5(name: str) -> Any:
    """``T5`` or ``UMT5``."""
    import transformers

    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(ALPHABET), **sizes, feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1
    )
    return shake(getattr(transformers, f"{name}EncoderModel")(config))


def flux(path: Path, *, guidance_embeds: bool = True, dynamic_shift: bool = True) -> Path:
    """FLUX.1-dev in small (schnell: neither guidance nor shift); one latent value is 4x4 pixels."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    stages = {"block_out_channels": (8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = AutoencoderKL(**stages, **kinds, latent_channels=4, scaling_factor=0.36, shift_factor=0.12)
    transformer = FluxTransformer2DModel(
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
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if dynamic_shift else {"shift": 1.0}
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**shift),
        vae=shake(vae),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5("T5"),
        tokenizer_2=tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def wan(path: Path, *, unipc: bool = True, boundary_ratio: float | None = None, expand_timesteps: bool = False) -> Path:
    """Wan 2.1 in small; with ``boundary_ratio`` Wan 2.2's pair of transformers, else optionally its per-token time."""
    import diffusers

    torch.manual_seed(0)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5("UMT5"),
        vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(**flow)
        if unipc
        else diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=wan_transformer(seed=3),
        transformer_2=None if boundary_ratio is None else wan_transformer(seed=4),
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
    ).save_pretrained(path)
    return path


def wan22(path: Path) -> Path:
    return wan(path, boundary_ratio=0.875)


def wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    latents = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 1.1, 0.7]}
    return shake(AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1, **latents))


def wan_transformer(seed: int) -> Any:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 128, "num_layers": 2, "text_dim": 48}
    channels = {"in_channels": 4, "out_channels": 4, "freq_dim": 32}
    return shake(WanTransformer3DModel(**sizes, **channels, rope_max_seq_len=64), seed=seed)
