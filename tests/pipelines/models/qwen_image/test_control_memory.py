"""A control network needs its memory beside a quantised transformer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from engines.quantization.linear import QuantLinear, weights_to_quantise
from engines.torch_engine.engine import TorchEngine
from pipelines import gpu_weights
from pipelines.blocks import opened
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraLimits
from tests.engines.support.rank_resources import separate_rank_resources
from tests.pipelines.support.checkpoints import tiny_qwen

CPU = torch.device("cpu")
NETWORK = "controlnet."


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_qwen.qwen_controlled)


def test_weights_to_quantise_stay_on_the_host_in_the_network_too(folder: Path) -> None:
    """The device's own loader fills both here as on a GPU, so the peak is that of the result."""
    checkpoint = Checkpoint(folder)
    on_device = dict[str, int]()

    def fill(model: nn.Module, files: Iterable[Path], _: torch.device, on_host: Collection[str], *_axis: Any) -> None:
        gpu_weights.fill(model, files, CPU, on_host)
        sizes = {name: x.nbytes for name, x in model.named_parameters() if name not in on_host}
        on_device[type(model).__name__] = sum(sizes.values())

    cuda = patch.object(checkpoint._opened, "models_device", torch.device("cuda"))
    with cuda, patch.object(opened, "fill", fill):
        module = checkpoint._loader(quantised=True, num_offloaded=0)("transformer")
    stays = weights_to_quantise(module, checkpoint.spec.shard_plan(checkpoint._opened.part_config("transformer")))
    assert any(name.startswith(NETWORK) for name in stays)
    assert any(not name.startswith(NETWORK) for name in stays)
    rest = {name: x.nbytes for name, x in module.named_parameters() if name not in stays}
    network = sum(size for name, size in rest.items() if name.startswith(NETWORK))
    expected = {"QwenImageControlNetModel": network, "QwenImageTransformer2DModel": sum(rest.values()) - network}
    assert on_device == expected


def test_adapters_that_may_come_keep_no_weights_of_the_network(folder: Path) -> None:
    """They change the transformer alone, whose loaded weights stay."""
    with separate_rank_resources():
        model = Checkpoint(folder, runtime_loras=LoraLimits()).denoiser(quantised=True)
        module = model.modules["transformer"]
        names = weights_to_quantise(module, model.plan)
        loaded = {name: weakref.ref(x) for name, x in module.named_parameters() if name in names}
        with closing(TorchEngine(model, precision="int8")) as engine:
            engine.load_weights()
            gc.collect()
            layers = {name for name, layer in module.named_modules() if isinstance(layer, QuantLinear)}
            assert {f"{name}.weight" for name in layers} == names
            kept = {name for name, weight in loaded.items() if weight() is not None}
        assert kept == {name for name in names if not name.startswith(NETWORK)}
