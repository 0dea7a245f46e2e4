"""A small Wan Animate 2 with random weights: a folder with a modular index, as published."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

from tests.pipelines.support.checkpoints.parts import flow, places, saved, shake, t5, tokenizer
from tests.pipelines.support.checkpoints.tiny import wan_vae

NUM_TOKENS = 32
NUM_LAYERS = 11
"""Without negative words block 9 is skipped."""


def wan_animate2(path: Path, kind: str = "WanAnimate2") -> Path:
    from diffusers import WanAnimate2Transformer3DModel
    from transformers import CLIPVisionConfig, CLIPVisionModel

    vision = {"hidden_size": 1280, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformer = WanAnimate2Transformer3DModel(
        text_len=NUM_TOKENS,
        in_dim=12,
        dim=4 * 24,
        ffn_dim=64,
        freq_dim=32,
        text_dim=48,
        out_dim=4,
        num_heads=4,
        num_layers=NUM_LAYERS,
    )
    entries = saved(
        {
            "text_encoder": t5("UMT5"),
            "tokenizer": tokenizer(NUM_TOKENS),
            "image_encoder": shake(CLIPVisionModel(CLIPVisionConfig(**vision, image_size=224, patch_size=14))),
            "vae": wan_vae(),
            "transformer": shake(transformer),
            "scheduler": flow(use_dynamic_shifting=False),
        },
        path,
    )
    index = {"_class_name": f"{kind}ModularPipeline", "_blocks_class_name": f"{kind}Blocks", **places(entries, path)}
    (path / "modular_model_index.json").write_text(json.dumps(index))
    return path


def without_weights(folder: Path, path: Path) -> Path:
    """Copy configurations, with transformer and auto-encoder in diffusers' default (the published) sizes."""
    import diffusers

    shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
    for part, kind in (("transformer", diffusers.WanAnimate2Transformer3DModel), ("vae", diffusers.AutoencoderKLWan)):
        own = inspect.signature(kind.__init__).parameters.values()
        usual = {one.name: one.default for one in own if one.default is not one.empty}
        (path / part / "config.json").write_text(json.dumps({"_class_name": kind.__name__, **usual}))
    return path


def wan_animate2_distilled(path: Path) -> Path:
    return wan_animate2(path, "WanAnimate2Distilled")


def wan_animate2_segments(path: Path) -> Path:
    """Write a model whose clips are made in segments of three latent frames."""
    return in_segments(wan_animate2(path))


def wan_animate2_distilled_segments(path: Path) -> Path:
    return in_segments(wan_animate2_distilled(path))


def in_segments(folder: Path) -> Path:
    (folder / "troupe.json").write_text(json.dumps({"frames_per_chunk": 9}))
    return folder
