"""The published models' transformer configurations, as data.

FLUX.1: black-forest-labs/flux, ``src/flux/util.py`` (hidden size 3072 = 24 heads of 128, depth 19 + 38, context 4096,
vector 768, axes 16/56/56), in the names of huggingface/diffusers ``scripts/convert_flux_to_diffusers.py``. Wan 2.1 and
2.2: huggingface/diffusers ``scripts/convert_wan_to_diffusers.py``. Parameter counts are the element counts that the
model pages on the Hugging Face hub state for the transformer's safetensors files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engines.core.model import DenoiserModel
from pipelines.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """``index`` has the pipeline's own settings (model_index.json); the model has ``num_transformers`` equal ones."""

    config: dict[str, Any]
    num_parameters: int
    index: dict[str, Any] | None = None
    num_transformers: int = 1


FLUX_CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}

WAN_CONFIG = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}

FLUX = {
    "FLUX.1-dev": RealModel(config=FLUX_CONFIG, num_parameters=11_901_408_320),
    "FLUX.1-schnell": RealModel(config={**FLUX_CONFIG, "guidance_embeds": False}, num_parameters=11_891_178_560),
}

WAN_SMALL = {**WAN_CONFIG, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_TI2V = {**WAN_CONFIG, "num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336}
WAN = {
    "Wan2.1-T2V-1.3B": RealModel(config=WAN_SMALL, num_parameters=1_418_996_800),
    "Wan2.1-T2V-14B": RealModel(config=WAN_CONFIG, num_parameters=14_288_491_584),
    "Wan2.2-T2V-A14B": RealModel(
        config=WAN_CONFIG,
        num_parameters=14_288_491_584,
        index={"boundary_ratio": 0.875, "expand_timesteps": False},
        num_transformers=2,
    ),
    "Wan2.2-TI2V-5B": RealModel(
        config={**WAN_TI2V, "in_channels": 48, "out_channels": 48},
        num_parameters=4_999_787_712,
        index={"boundary_ratio": None, "expand_timesteps": True},
    ),
}


@cache
def model_of(name: str) -> DenoiserModel:
    """Return a published model without weights and buffers, in bfloat16: made once, in seconds for the largest.

    Nothing of it is ever on the CPU: a heap that once held gigabytes is so large that Linux refuses to fork its
    process.
    """
    with torch.device("meta"):
        return Checkpoint.of_configuration(name, "meta", torch.bfloat16).outline()
