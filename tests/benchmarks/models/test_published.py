"""What is timed is the model's own arithmetic, all of it, and ours gives the answer of diffusers' module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models.published import PublishedModel
from engines.parallel.self_check import relative_difference
from engines.torch_engine.engine import TorchEngine
from tests.pipelines.support import tiny_pictures, tiny_qwen

CPU = torch.device("cpu")
MAKERS = {"qwen": tiny_qwen.qwen, "z_image": tiny_pictures.z_image, "flux2": tiny_pictures.flux2_dev}


@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_its_step(name: str, tmp_path: Path) -> None:
    model = PublishedModel.made(str(MAKERS[name](tmp_path)), CPU, torch.float32, side=96, num_tokens=20)
    expected, num_products = counted(model)
    assert num_products < model.flop() < 2 * num_products, "attention is the rest"
    engine = TorchEngine(model.denoiser(), strategy="ulysses")
    (answer,) = engine.predict((model.branch,), (0,))
    assert relative_difference(answer, expected) < 1e-5


def counted(model: PublishedModel) -> tuple[torch.Tensor, int]:
    """An answer, and the arithmetic of its linear layers, counted by their hooks."""
    total = 0

    def count(layer: Any, _inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        total += 2 * layer.in_features * output.numel()

    layers = [part for part in model.module.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    answer = model.call()
    for hook in hooks:
        hook.remove()
    return answer, total
