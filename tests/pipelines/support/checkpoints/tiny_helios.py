"""Tiny checkpoints of Helios, random weights, in diffusers' layout: the base model, and staged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import shake, t5, tokenizer
from tests.pipelines.support.checkpoints.tiny import wan_vae

NUM_TOKENS = 32


def helios(path: Path) -> Path:
    import diffusers

    parts = _parts()
    diffusers.HeliosPipeline(scheduler=diffusers.HeliosScheduler(stages=1), **parts).save_pretrained(path)
    return path


def helios_amplified(path: Path) -> Path:
    """Write a model that scales the keys of its history by head."""
    import diffusers

    parts = _parts(is_amplify_history=True)
    diffusers.HeliosPipeline(scheduler=diffusers.HeliosScheduler(stages=1), **parts).save_pretrained(path)
    return path


def helios_pyramid(path: Path) -> Path:
    import diffusers

    diffusers.HeliosPyramidPipeline(scheduler=diffusers.HeliosScheduler(), **_parts()).save_pretrained(path)
    return path


def helios_distilled(path: Path) -> Path:
    import diffusers

    scheduler = diffusers.HeliosDMDScheduler()
    diffusers.HeliosPyramidPipeline(scheduler=scheduler, is_distilled=True, **_parts()).save_pretrained(path)
    return path


def _parts(**more: Any) -> dict[str, Any]:
    import diffusers

    transformer = diffusers.HeliosTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=48,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_dim=(8, 8, 8),
        **more,
    )
    return {
        "tokenizer": tokenizer(NUM_TOKENS),
        "text_encoder": t5("UMT5"),
        "vae": wan_vae(),
        "transformer": shake(transformer),
    }
