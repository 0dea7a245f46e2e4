"""A small Wan VACE with random weights: Wan with a second stack of layers for a control clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import multistep, shake, t5, tokenizer
from tests.pipelines.support.checkpoints.tiny import wan_vae


def wan_vace(path: Path) -> Path:
    """Write a model with one transformer, like Wan 2.1."""
    return _saved(path, transformer=_transformer(3))


def wan22_vace(path: Path) -> Path:
    """Write a Wan 2.2 with a transformer for high noise and one for low noise."""
    return _saved(path, transformer=_transformer(3), transformer_2=_transformer(4), boundary_ratio=0.875)


def _saved(path: Path, **parts: Any) -> Path:
    from diffusers import WanVACEPipeline

    WanVACEPipeline(
        tokenizer=tokenizer(512), text_encoder=t5("UMT5"), vae=wan_vae(), scheduler=multistep(), **parts
    ).save_pretrained(path)
    return path


def _transformer(seed: int) -> Any:
    from diffusers import WanVACETransformer3DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 3, "text_dim": 48}
    channels = {"in_channels": 4, "out_channels": 4, "vace_in_channels": 4 + 4 + 64, "freq_dim": 32}
    model = WanVACETransformer3DModel(**sizes, **channels, rope_max_seq_len=64, vace_layers=[0, 2])
    return shake(model, seed=seed)
