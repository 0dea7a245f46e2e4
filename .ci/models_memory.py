"""How many parameters published transformers have, and how much memory of a rank they take, divided or not."""

from __future__ import annotations

import json
from functools import cache

from torch import nn

from engines.core.model import DenoiserModel
from engines.parallel.pipeline import pipeline_blocks
from pipelines.checkpoint import Checkpoint
from pipelines.loading import PUBLISHED

GIB = 2**30


def configuration(name: str) -> str:
    """Models with the same one have the same weights."""
    parts = (json.loads(file.read_text()) for file in sorted((PUBLISHED / name).glob("*/config.json")))
    own = [part for part in parts if is_denoiser_class(part["_class_name"])]
    _SAME.setdefault(json.dumps(own), name)
    return _SAME[json.dumps(own)]


_SAME: dict[str, str] = {}


def is_denoiser_class(name: str) -> bool:
    return "Transformer" in name or name.startswith("UNet")


def counted(name: str) -> tuple[int, tuple[str, ...]]:
    """Parameters, and the GiB of weights in bfloat16 that a rank has: all of them, or with weights divided."""
    return _counted(configuration(name))


@cache
def _counted(name: str) -> tuple[int, tuple[str, ...]]:
    model = Checkpoint.of_configuration(name, "meta", "bfloat16").weightless()
    number = sum(weight.numel() for module in model.modules.values() for weight in module.parameters())
    divided = [(tensor, 1) for tensor in (2, 4)] + [(1, stages) for stages in (2, 4)]
    whole = gib(model, 1, 1)
    shares = (gib(model, *way) if allows(model, *way) else None for way in divided)
    return number, (f"{whole:.1f}", *("—" if share is None else f"{share:.1f}" for share in shares))


def allows(model: DenoiserModel, tensor: int, stages: int) -> bool:
    if tensor > 1:
        return bool(model.plan.linears) and model.num_heads % tensor == 0
    return min(len(pipeline_blocks(module, model.plan)) for module in model.modules.values()) >= stages


def gib(model: DenoiserModel, tensor: int, stages: int) -> float:
    """As the cost model counts it: linears of the blocks by the tensor axis, blocks by the stages, the rest whole."""
    total = 0.0
    for module in model.modules.values():
        inner = {id(weight) for block in model.plan.blocks_of(module) for weight in block.parameters()}
        linears = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
        split = {id(layer.weight) for name, layer in linears if model.plan.rule_of(name) is not None}
        for weight in module.parameters():
            share = weight.nbytes / (tensor if id(weight) in split else 1)
            total += share / (stages if id(weight) in inner else 1)
    return total / GIB
