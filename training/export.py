"""Write the trained parts as pipelines in diffusers' own directory layout, in float16."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline, FluxPipeline, WanPipeline
from transformers import PreTrainedTokenizerBase

from training.flux_shapes import model as flux_model
from training.flux_shapes.model import FluxModel
from training.wan_shapes import model as wan_model
from training.wan_shapes.model import WanModel

SHARD_SIZE = "1GB"


def _half(module: Any) -> Any:
    return module.to(device="cpu", dtype=torch.float16).eval()


def export_flux(
    path: Path,
    model: FluxModel,
    vae: Any,
    clip_tokenizer: PreTrainedTokenizerBase,
    t5_tokenizer: PreTrainedTokenizerBase,
    *,
    edits: bool = False,
) -> None:
    """Write a directory for `FluxPipeline.from_pretrained`, or for `FluxKontextPipeline` if the model edits pictures.
    The model's own weights become float16 on the CPU."""
    kind: Any = FluxKontextPipeline if edits else FluxPipeline
    pipeline = kind(
        scheduler=flux_model.build_scheduler(),
        vae=_half(vae),
        text_encoder=_half(model.clip),
        tokenizer=clip_tokenizer,
        text_encoder_2=_half(model.t5),
        tokenizer_2=t5_tokenizer,
        transformer=_half(model.transformer),
    )
    _save(pipeline, path)


def export_wan(path: Path, model: WanModel, vae: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a directory for `WanPipeline.from_pretrained`. The model's own weights become float16 on the CPU."""
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_half(model.umt5),
        vae=_half(vae),
        scheduler=wan_model.build_scheduler(),
        transformer=_half(model.transformer),
    )
    _save(pipeline, path)


def _save(pipeline: Any, path: Path) -> None:
    """Save the pipeline without the path that the auto-encoder was read from."""
    pipeline.save_pretrained(path, max_shard_size=SHARD_SIZE)
    config = path / "vae" / "config.json"
    written = json.loads(config.read_text())
    written.pop("_name_or_path", None)
    config.write_text(json.dumps(written, indent=2) + "\n")
