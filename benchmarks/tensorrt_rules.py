"""Ways to choose scales and layers for int8 and fp8, in torch: `python -m benchmarks.tensorrt_accuracy --rules`.

A scale from the largest magnitude seen (what the engine does), from the 99.99th percentile, or the one with the least
squared error; and all linears of the blocks, all but those that write the residual stream, or queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tensorrt_accuracy import CALIBRATION_NOISE, Engines, Prompts, Subject, calibrated
from engines.tensorrt_engine.quantize import (
    LARGEST,
    PER_TENSOR,
    QUANTIZE_DEQUANTIZE,
    Kind,
    QuantizedLinear,
    quantized_linears,
)
from pipelines.run import Pipeline, PlainEngine

SAMPLES_PER_CALL, NUM_CLIPS, SMALLEST_CLIP = 2000, 41, 0.2
WRITERS = ("proj_out", "net.2", "to_out.0", "to_add_out")
QUERIES = ("to_q", "to_k", "to_v")
Amax = Mapping[str, float]


def samples(subject: Subject, prompts: Prompts) -> dict[str, Tensor]:
    """Magnitudes of each linear's inputs, drawn at random over all steps of the prompts."""
    model = subject.model(torch.float32)
    (module,) = model.modules.values()
    generator, drawn = torch.Generator().manual_seed(0), dict[str, list[Tensor]]()

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            flat = args[0].reshape(-1).abs()
            drawn.setdefault(name, []).append(flat[torch.randint(len(flat), (SAMPLES_PER_CALL,), generator=generator)])

        return look

    for name, layer in quantized_linears(module, model.plan):
        layer.register_forward_pre_hook(watch(name))
    pipeline = subject.pipeline(torch.float32, PlainEngine(model=model))
    for seed, (_, prompt) in enumerate(prompts):
        pipeline.denoise(subject.request(prompt, CALIBRATION_NOISE + seed))
    return {name: torch.cat(parts) for name, parts in drawn.items()}


def least_squares(x: Tensor, largest: float, kind: Kind) -> float:
    """The clipping magnitude, up to ``largest``, with the least squared error over the samples."""

    def error(clip: float) -> float:
        rounded = QUANTIZE_DEQUANTIZE(x, torch.tensor(clip / LARGEST[kind]), PER_TENSOR, kind)
        return float((rounded - x).square().sum())

    clips = [float(share) * largest for share in torch.linspace(SMALLEST_CLIP, 1, NUM_CLIPS)]
    return min(clips, key=error)


def percentile(x: Tensor, share: float) -> float:
    return float(x.kthvalue(max(1, round(share * len(x)))).values)


def engines_by_rule(subject: Subject, prompts: Prompts) -> Engines:
    amax, seen = calibrated(subject, prompts), samples(subject, prompts)
    scales: dict[str, Callable[[Kind], Amax]] = {
        "largest": lambda kind: amax,
        "99.99 %": lambda kind: {name: percentile(x, 0.9999) for name, x in seen.items()},
        "least squares": lambda kind: {name: least_squares(x, amax[name], kind) for name, x in seen.items()},
    }
    layers: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "no residual writers": lambda name: not name.endswith(WRITERS),
        "queries, keys, values": lambda name: name.endswith(QUERIES),
    }
    kinds: tuple[Kind, ...] = ("int8", "fp8")
    by_scale = [(kind, scale, "all") for kind in kinds for scale in scales]
    by_layer = [(kind, "largest", which) for kind in kinds for which in layers if which != "all"]
    return {
        f"{kind}, {scale}, {which}": _lazily(subject, kind, scales[scale], layers[which])
        for kind, scale, which in by_scale + by_layer
    }


def _lazily(
    subject: Subject, kind: Kind, scale: Callable[[Kind], Amax], chosen: Callable[[str], bool]
) -> Callable[[], Pipeline]:
    def make() -> Pipeline:
        model, amax = subject.model(torch.float32), scale(kind)
        (module,) = model.modules.values()
        layers: list[tuple[str, Any]] = [one for one in quantized_linears(module, model.plan) if chosen(one[0])]
        for name, layer in layers:
            module.set_submodule(name, QuantizedLinear(layer, amax[name], kind))
        return subject.pipeline(torch.float32, PlainEngine(model=model))

    return make
