"""Adapters of a few layers, key by key, and their changes of a model's weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource

Tensors = dict[str, Tensor]
RANK = 2
SPELLINGS = {
    "down": ("lora_down", "lora_up"),
    "A": ("lora_A", "lora_B"),
    "default": ("lora_A.default", "lora_B.default"),
}


@cache
def plain(folder: Path) -> Tensors:
    module, *_ = Checkpoint(folder).denoiser().modules.values()
    return dict(module.state_dict())


def added(folder: Path, file: Path, part: str = "") -> Tensors:
    """Return the changes of an adapter by parameter name."""
    module, *_ = Checkpoint(folder, loras=[LoraSource(path=str(file), part=part)]).denoiser().modules.values()
    base = plain(folder)
    return {name: x - base[name] for name, x in module.state_dict().items() if not torch.equal(x, base[name])}


def pair(key: str, rows: int, columns: int, *, spelling: str = "down", alpha: float | None = None) -> Tensors:
    """Return a layer's pair as written by kohya's scripts, or by PEFT."""
    down, up = SPELLINGS[spelling]
    said = {} if alpha is None else {f"{key}.alpha": torch.tensor(alpha)}
    return {f"{key}.{down}.weight": torch.randn(RANK, columns), f"{key}.{up}.weight": torch.randn(rows, RANK)} | said


def product(tensors: Tensors, key: str, scale: float = 1.0) -> Tensor:
    halves = {name: x for name, x in tensors.items() if name.startswith(f"{key}.lora_")}
    (down,) = (x for name, x in halves.items() if "lora_A" in name or "lora_down" in name)
    (up,) = (x for name, x in halves.items() if "lora_B" in name or "lora_up" in name)
    return scale * up @ down


def written(tensors: Tensors, path: Path) -> Path:
    save_file(tensors, path / "adapter.safetensors")
    return path / "adapter.safetensors"


def check(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.view(found[name].shape), rtol=1e-4, atol=1e-5)
