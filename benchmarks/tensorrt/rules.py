"""Ways to choose scales and layers for int8 and fp8, in torch: `python -m benchmarks.tensorrt.rules`.

A scale from the largest magnitude seen (what the engine does), from the 99.99th percentile, or the one with the least
squared error; one scale a weight instead of one for each of its output features; and all linears of the blocks, all
but those that write the residual stream, or all but those of the first and the last block. The last line of output is
one JSON document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.tensorrt.accuracy import CALIBRATION_NOISE, Engines, Prompts, Subject, calibrated, compare
from engines.core.spec import Scheme
from engines.quantization.linear import LARGEST, quantizable
from engines.quantization.onnx import PER_TENSOR, QUANTIZE_DEQUANTIZE, QuantizedLinear
from pipelines.run import Pipeline, PlainEngine

SAMPLES_PER_CALL, NUM_CLIPS, SMALLEST_CLIP = 2000, 41, 0.2
WRITERS = ("proj_out", "net.2", "to_out.0", "to_add_out")
KINDS: tuple[Scheme, ...] = ("int8", "fp8")
Amax = Mapping[str, float]


def samples(subject: Subject, prompts: Prompts) -> dict[str, Tensor]:
    """Returns magnitudes of each linear's inputs, drawn at random over all steps of the prompts."""
    model = subject.model(torch.float32)
    (module,) = model.modules.values()
    generator, drawn = torch.Generator().manual_seed(0), dict[str, list[Tensor]]()

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            flat = args[0].reshape(-1).abs()
            drawn.setdefault(name, []).append(flat[torch.randint(len(flat), (SAMPLES_PER_CALL,), generator=generator)])

        return look

    for name, layer in quantizable(module, model.plan):
        layer.register_forward_pre_hook(watch(name))
    pipeline = subject.pipeline(torch.float32, PlainEngine(model=model))
    for seed, (_, prompt) in enumerate(prompts):
        pipeline.denoise(subject.request(prompt, CALIBRATION_NOISE + seed))
    return {name: torch.cat(parts) for name, parts in drawn.items()}


def least_squares(x: Tensor, largest: float, kind: Scheme) -> float:
    """Returns the clipping magnitude, up to ``largest``, with the least squared error over the samples."""

    def error(clip: float) -> float:
        rounded = QUANTIZE_DEQUANTIZE(x, torch.tensor(clip / LARGEST[kind]), PER_TENSOR, kind)
        return float((rounded - x).square().sum())

    clips = [float(share) * largest for share in torch.linspace(SMALLEST_CLIP, 1, NUM_CLIPS)]
    return min(clips, key=error)


def percentile(x: Tensor, share: float) -> float:
    return float(x.kthvalue(max(1, round(share * len(x)))).values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How scales are chosen, for which layers."""

    kind: Scheme
    scale: str = "largest"
    layers: str = "all"
    per_weight: bool = False

    def __str__(self) -> str:
        weights = ", one scale a weight" if self.per_weight else ""
        return f"{self.kind}, {self.scale}, {self.layers}{weights}"


RULES = tuple(
    rule
    for kind in KINDS
    for rule in (
        Rule(kind=kind),
        Rule(kind=kind, scale="99.99 %"),
        Rule(kind=kind, scale="least squares"),
        Rule(kind=kind, per_weight=True),
        Rule(kind=kind, layers="no residual writers"),
        Rule(kind=kind, layers="inner blocks"),
    )
)


def engines_by_rule(subject: Subject, prompts: Prompts) -> Engines:
    largest, magnitudes = calibrated(subject, prompts), samples(subject, prompts)
    return {str(rule): partial(_pipeline, subject, rule, chosen_scales(rule, largest, magnitudes)) for rule in RULES}


def chosen_scales(rule: Rule, largest: Amax, magnitudes: Mapping[str, Tensor]) -> Amax:
    if rule.scale == "99.99 %":
        return {name: percentile(x, 0.9999) for name, x in magnitudes.items()}
    if rule.scale == "least squares":
        return {name: least_squares(x, largest[name], rule.kind) for name, x in magnitudes.items()}
    return largest


def chosen_layers(rule: Rule, names: Sequence[str]) -> list[str]:
    blocks = list(dict.fromkeys(block_of(name) for name in names))
    if rule.layers == "inner blocks":
        return [name for name in names if block_of(name) in blocks[1:-1]]
    return [name for name in names if rule.layers == "all" or not name.endswith(WRITERS)]


def block_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _pipeline(subject: Subject, rule: Rule, amax: Amax) -> Pipeline:
    model = subject.model(torch.float32)
    (module,) = model.modules.values()
    layers = dict(quantizable(module, model.plan))
    for name in chosen_layers(rule, list(layers)):
        quantized = QuantizedLinear(layers[name], amax[name], rule.kind)
        if rule.per_weight:
            quantized.weight_scale.fill_(float(quantized.weight_scale.max()))
        module.set_submodule(name, quantized)
    return subject.pipeline(torch.float32, PlainEngine(model=model))


def main() -> None:
    compare(__doc__, lambda subject, _, others: engines_by_rule(subject, others))


if __name__ == "__main__":
    main()
