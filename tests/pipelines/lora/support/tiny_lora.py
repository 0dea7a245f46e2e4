"""Small adapters as training scripts write them: made by PEFT, saved by diffusers; and what diffusers makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from pipelines.checkpoint import Checkpoint
from pipelines.modular import open_modular
from pipelines.request import Lora, MediaRequest
from pipelines.size import Size
from tests.pipelines.support.references.own_call import own_state


def linears_of(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]


def adapted(folder: Path, seed: int, **config: Any) -> Any:
    """The transformer with a random adapter on every linear layer, large enough to change the picture."""
    transformer = Checkpoint(folder).denoiser().modules["transformer"]
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": linears_of(transformer), **config}
    transformer.add_adapter(LoraConfig(**settings, init_lora_weights=False))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.7 / parameter[0].numel() ** 0.5
    return transformer


def write_lora(folder: Path, path: Path, seed: int, *, says_alpha: bool = True, **config: Any) -> Path:
    """A folder with ``pytorch_lora_weights.safetensors`` for the model in ``folder``."""
    transformer = adapted(folder, seed, **config)
    said = {"transformer_lora_adapter_metadata": transformer.peft_config["default"].to_dict()} if says_alpha else {}
    pipeline_class = type(open_modular(folder))
    pipeline_class.save_lora_weights(path, transformer_lora_layers=get_peft_model_state_dict(transformer), **said)
    return path


def reference(folder: Path, request: MediaRequest, adapters: Mapping[Path, float]) -> Tensor:
    """The latents of diffusers' own pipeline with its own adapters."""

    def load(pipeline: Any) -> None:
        for number, path in enumerate(adapters):
            pipeline.load_lora_weights(str(path), adapter_name=f"adapter-{number}")
        if adapters:
            names = [f"adapter-{number}" for number in range(len(adapters))]
            pipeline.set_adapters(names, list(adapters.values()))

    latents: Tensor = own_state(folder, request, change=load).get("latents")
    return latents


def request_of(folder: Path, loras: tuple[Lora, ...] = ()) -> MediaRequest:
    defaults = Checkpoint(folder).defaults
    multiple = defaults.size_multiple
    frames = 1 + defaults.frame_multiple if defaults.kind == "video" else None
    size = Size(width=5 * multiple, height=3 * multiple, num_frames=frames)
    return defaults.request(size, prompt="a red circle", num_inference_steps=2, seed=5, loras=loras)
