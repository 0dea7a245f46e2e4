"""Quantized graphs in half precision, where rounding moves values over quantization steps.

A quantized model answers the smallest change of its input with flips: values near the middle between two steps land on
the other one, and later values differ by a whole step. Shaking the float32 int8 model's inputs by half precision's
rounding (2**-11) moves its prediction by 2.2 % here. The graph and the torch model differ by as much in half precision,
since they round in different places. So a whole forward allows no closer comparison. With the same input for both,
single layers differ only by half precision's own rounding. A fault would show there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.core.model import DenoiserModel
from engines.core.spec import ParallelSpec, Scheme
from engines.quantization.calibration import recording
from engines.quantization.onnx import QuantizedLinear, quantize
from engines.tensorrt_engine.export.graph import export_graph
from tests.engines.tensorrt_engine.support.all_ranks import export_case, relative_error
from tests.engines.tensorrt_engine.support.simulate import Simulator
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast, reference

HALF_ROUNDING = 2**-11
LAYER_TOLERANCE = 2 * HALF_ROUNDING
"""Both results are rounded once to half precision: at most ``HALF_ROUNDING`` each (4.0e-4 measured in all)."""

FLIPS = 2.0
"""Allowed ratio of two roundings of a whole forward to the answer to a shake by rounding (0.99 measured)."""


class Each(nn.Module):
    """Runs every layer on an input of its own."""

    def __init__(self, layers: list[QuantizedLinear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers, inputs, strict=True))


def quantized_model(family: str, kind: Scheme, dtype: torch.dtype) -> tuple[DenoiserModel, dict[str, Tensor]]:
    """Return the model and inputs in ``dtype``, with scales and weights rounded to half precision."""
    specimen = SPECIMENS[family]
    model, inputs = specimen.model(), specimen.inputs()
    (module,) = model.modules.values()
    with recording(module, model.plan) as amax:
        reference(model, inputs)
    quantize(module.half(), model.plan, amax, kind)
    module.to(dtype)
    return model, cast(specimen, inputs, dtype)


def layers_run(model: DenoiserModel, inputs: dict[str, Tensor]) -> list[tuple[QuantizedLinear, Tensor, Tensor]]:
    """Return each quantized layer with its input and output in one forward."""
    (module,) = model.modules.values()
    seen: list[tuple[QuantizedLinear, Tensor, Tensor]] = []
    layers = [layer for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    hooks = [layer.register_forward_hook(lambda own, args, out: seen.append((own, args[0], out))) for layer in layers]
    reference(model, inputs)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(layers)
    return seen


def in_graph(layers: list[QuantizedLinear], inputs: list[Tensor]) -> list[Tensor]:
    each = Each(layers).eval()
    with torch.no_grad():
        traced = torch.export.export(each, tuple(inputs), strict=False).module(check_guards=False)
    names = tuple(f"x{index}" for index in range(len(inputs))), tuple(f"y{index}" for index in range(len(inputs)))
    graph = export_graph(traced, *names, 1)
    weights = {name: weight.detach().numpy() for name, weight in each.named_parameters()}
    feed = {name: x.contiguous().numpy() for name, x in zip(names[0], inputs, strict=True)}
    (outputs,) = Simulator(graph.serialized()).run([feed | {name: weights[name] for name in graph.weights}])
    return [torch.from_numpy(output).float() for output in outputs]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("flux", "fp8"),
        pytest.param("flux", "int8", marks=pytest.mark.slow),
        pytest.param("wan", "fp8", marks=pytest.mark.slow),
        pytest.param("wan", "int8", marks=pytest.mark.slow),
    ],
)
def test_each_layer_computes_what_the_quantized_layer_does(family: str, kind: Scheme) -> None:
    layers, inputs, expected = map(list, zip(*layers_run(*quantized_model(family, kind, torch.float16)), strict=True))
    computed = in_graph(layers, inputs)
    for given, whole in zip(computed, expected, strict=True):
        assert relative_error(given, whole.float()) <= LAYER_TOLERANCE
    with torch.no_grad():  # a control: layers whose scales differ by two percent
        for layer in layers:
            layer.input_scale.mul_(1.02)
        others = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    for given, other in zip(computed, others, strict=True):
        assert not relative_error(given, other.float()) <= 5 * LAYER_TOLERANCE


@pytest.mark.parametrize("family", ["flux", pytest.param("wan", marks=pytest.mark.slow)])
def test_a_whole_forward_differs_by_no_more_than_flips_explain(family: str) -> None:
    wide, inputs = quantized_model(family, "int8", torch.float32)
    exact = reference(wide, inputs)
    specimen, flips = SPECIMENS[family], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shaken = {
            name: x
            if name in specimen.float32_inputs
            else x + x * HALF_ROUNDING * torch.randn(x.shape, generator=generator)
            for name, x in inputs.items()
        }
        flips.append(relative_error(reference(wide, shaken), exact))
    half, half_inputs = quantized_model(family, "int8", torch.float16)
    # the half-precision model is quantized already: the exporter takes it unchanged
    case = export_case(half, half_inputs, ParallelSpec.of("ulysses", 2), weights_as_inputs=False)
    for prediction in case.predictions(half_inputs):
        assert relative_error(prediction, reference(half, half_inputs).float()) <= FLIPS * sorted(flips)[1]
