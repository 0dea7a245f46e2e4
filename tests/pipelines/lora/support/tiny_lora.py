"""Small adapters as training scripts write them (PEFT, diffusers), and diffusers' latents with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from pipelines.checkpoint import Checkpoint
from pipelines.directory import open_modular
from pipelines.request import Lora, MediaRequest
from pipelines.size import Size
from tests.pipelines.support.references.own_call import Change, own_state

PEFT = "adapter_model.safetensors"


def linears_of(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]


def adapted(folder: Path, seed: int, **config: Any) -> Any:
    """Return the transformer with a random adapter on every linear, large enough to change the picture."""
    transformer: Any = next(iter(Checkpoint(folder).denoiser().modules.values()))
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": linears_of(transformer), **config}
    transformer.add_adapter(LoraConfig(**settings, init_lora_weights=False))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.7 / parameter[0].numel() ** 0.5
    return transformer


def write_lora(folder: Path, path: Path, seed: int, *, says_alpha: bool = True, **config: Any) -> Path:
    """Write ``pytorch_lora_weights.safetensors`` for the model in ``folder`` and return its folder.

    The file is PEFT's own where diffusers has no adapter loader for the pipeline.
    """
    transformer = adapted(folder, seed, **config)
    pipeline_class = type(open_modular(folder))
    if not hasattr(pipeline_class, "save_lora_weights"):
        return write_peft(transformer, path)
    part = getattr(pipeline_class, "transformer_name", "unet")
    config, layers = transformer.peft_config["default"].to_dict(), get_peft_model_state_dict(transformer)
    if pipeline_class.save_lora_weights.__func__ is LoraBaseMixin.save_lora_weights.__func__:  # it only loads them
        pipeline_class._save_lora_weights(path, {part: layers}, {part: config} if says_alpha else {})
        return path
    said = {f"{part}_lora_adapter_metadata": config} if says_alpha else {}
    pipeline_class.save_lora_weights(path, **{f"{part}_lora_layers": layers}, **said)
    return path


def write_peft(transformer: Any, path: Path) -> Path:
    """Write what PEFT saves: ``adapter_model.safetensors`` with ``adapter_config.json``."""
    path.mkdir()
    layers = get_peft_model_state_dict(transformer)
    save_file({f"base_model.model.{key}": x.contiguous() for key, x in layers.items()}, path / PEFT)
    config = transformer.peft_config["default"].to_dict()
    written = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return path


def loader(adapters: Mapping[Path, float]) -> Change:
    """Return a function that loads adapters with scales into a pipeline, by diffusers' loader or PEFT's."""

    def load(pipeline: Any) -> None:
        names = [f"adapter-{number}" for number in range(len(adapters))]
        if not hasattr(pipeline, "load_lora_weights"):
            load_by_peft(pipeline.transformer, dict(zip(names, adapters.items(), strict=True)))
            return
        for name, path in zip(names, adapters, strict=True):
            pipeline.load_lora_weights(str(path), adapter_name=name)
        if adapters:
            pipeline.set_adapters(names, list(adapters.values()))

    return load


def load_by_peft(transformer: Any, adapters: Mapping[str, tuple[Path, float]]) -> None:
    """Load adapters by PEFT, which replaces the linears of ``transformer`` in place."""
    model: Any = None
    for name, (path, scale) in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(transformer, str(path), adapter_name=name)
        else:
            model.load_adapter(str(path), name)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.set_scale(name, scale)
    if model is not None:
        model.base_model.set_adapter(list(adapters))


def reference(folder: Path, request: MediaRequest, adapters: Mapping[Path, float]) -> Tensor:
    """Return latents of diffusers' own pipeline with its own adapters."""
    latents: Tensor = own_state(folder, request, change=loader(adapters)).get("latents")
    return latents


def request_of(folder: Path, loras: tuple[Lora, ...] = ()) -> MediaRequest:
    defaults = Checkpoint(folder).defaults
    multiple = defaults.size_multiple
    frames = 1 + defaults.frame_multiple if defaults.kind == "video" else None
    size = Size(width=5 * multiple, height=3 * multiple, num_frames=frames)
    words = {"prompt": "a red circle"} | ({"negative_prompt": "blue"} if defaults.true_cfg_scale > 1 else {})
    return defaults.request(size, **words, num_inference_steps=2, seed=5, loras=loras)
