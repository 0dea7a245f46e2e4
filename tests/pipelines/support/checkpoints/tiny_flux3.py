"""FLUX.3 and its distilled form, small, with random weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import HIDDEN, flow, flux2_auto_encoder, saved, shake
from tests.pipelines.support.checkpoints.tiny_qwen import Qwen3Processor, qwen3_vl

NUM_LAYERS, NUM_STACKED = 32, 8
"""Layers of the text encoder, and how many states are stacked."""
LOAD_PROCESSOR = "transformers.AutoProcessor.from_pretrained"


class Flux3Processor(Qwen3Processor):
    """Returns the prompt unchanged."""

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        return messages[0]["content"]


def flux3(path: Path, *, distilled: bool = False) -> Path:
    from diffusers import Flux3Transformer2DModel

    transformer = Flux3Transformer2DModel(
        in_channels=16,
        cond_in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=NUM_STACKED * HIDDEN,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=distilled,
    )
    parts = {
        "scheduler": flow(shift=6.93, use_dynamic_shifting=False),
        "vae": flux2_auto_encoder(),
        "transformer": shake(transformer),
        "text_encoder": qwen3_vl(NUM_LAYERS),
    }
    name = "Flux3DistilledPipeline" if distilled else "Flux3Pipeline"
    index = {"_class_name": name, **saved(parts, path), "tokenizer": ["transformers", "AutoProcessor"]}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


flux3_distilled = partial(flux3, distilled=True)


def encode_as_given(pipeline: Any) -> None:
    """Follow diffusers' advice for folders without a model that rewrites prompts."""
    pipeline._blocks.sub_blocks.pop("prompt_upsampler")
