"""int8 and fp8 round right, record calibration, and give graphs that compute the quantized model's answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engines.core.spec import ParallelSpec
from engines.core.tensors import fingerprint
from engines.quantization.calibration import calibration_of, recording, save_calibration
from engines.quantization.linear import quantizable
from engines.quantization.onnx import QUANTIZE_DEQUANTIZE, QuantizedLinear, quantization, quantize
from engines.tensorrt_engine.build.report import read_engine_text
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.all_ranks import export_case, relative_error
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast, reference

NUM_FLUX_LINEARS = 8 + 4 + 5  # attention and two MLPs of a dual block; attention, MLP and output of a single one


def test_int8_rounds_to_multiples_of_the_scale() -> None:
    x = torch.tensor([0.0, 0.26, -0.74, 200.0, -200.0])
    assert QUANTIZE_DEQUANTIZE(x, torch.tensor(0.5), -1, "int8").tolist() == [0.0, 0.5, -0.5, 63.5, -64.0]


def test_fp8_keeps_three_bits_and_saturates() -> None:
    x = torch.tensor([1.0, 1.06, 1.07, 500.0])
    assert QUANTIZE_DEQUANTIZE(x, torch.tensor(1.0), -1, "fp8").tolist() == [1.0, 1.0, 1.125, 448.0]


def test_one_scale_per_output_feature() -> None:
    weight = torch.tensor([[1.0, 0.4], [100.0, 40.0]])
    rounded = QUANTIZE_DEQUANTIZE(weight, torch.tensor([0.5, 50.0]), 0, "int8")
    assert rounded.tolist() == [[1.0, 0.5], [100.0, 50.0]]


@pytest.mark.parametrize(("kind", "allowed"), [("int8", 0.01), ("fp8", 0.04)])
def test_linear_is_nearly_itself(kind: str, allowed: float) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32), torch.randn(10, 64)
    quantized = QuantizedLinear(linear, float(x.abs().max()), kind)  # type: ignore[arg-type]
    assert 0 < relative_error(quantized(x), linear(x)) < allowed
    assert set(dict(quantized.named_parameters())) == {"weight", "bias"}


def test_layers_of_the_blocks_without_modulation() -> None:
    model = SPECIMENS["flux"].model()
    names = [name for name, _ in quantizable(model.modules["transformer"], model.plan)]
    assert len(names) == NUM_FLUX_LINEARS
    assert not any("norm" in name or "embed" in name for name in names)


def test_a_linear_that_calibration_missed_is_an_error() -> None:
    model = SPECIMENS["wan"].model()
    with pytest.raises(ValueError, match="run every block once"):
        quantize(model.modules["transformer"], model.plan, {}, "int8")


def test_records_belong_to_their_weights(tmp_path: Path) -> None:
    specimen = SPECIMENS["wan"]
    model = specimen.model()
    (module,) = model.modules.values()
    with pytest.raises(ValueError, match="--calibrate"):
        quantization(model, "transformer", "int8", tmp_path)
    with recording(module, model.plan) as amax:
        reference(model, specimen.inputs())
    path = calibration_of(module, tmp_path)
    save_calibration({"transformer": amax}, path)
    assert quantization(model, "transformer", "int8", tmp_path).amax == amax
    before = fingerprint(module)
    with torch.no_grad():
        module.get_submodule("blocks.0.ffn.net.2").weight.mul_(1.01)  # type: ignore[operator]
    assert fingerprint(module) != before
    assert path.stem == before
    with pytest.raises(ValueError, match="--calibrate"):
        quantization(model, "transformer", "int8", tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("wan", "fp8", torch.float32),
        # int8 in every run: a whole forward of FLUX in half precision (test_onnx_half.py)
        pytest.param("flux", "int8", torch.float32, marks=pytest.mark.slow),
        pytest.param("flux", "fp8", torch.float32, marks=pytest.mark.slow),
        pytest.param("wan", "int8", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_graph_computes_what_the_quantized_model_does(
    build_file: Build, family: str, kind: str, dtype: torch.dtype
) -> None:
    specimen = SPECIMENS[family]
    model, inputs = specimen.model(), specimen.inputs()
    (module,) = model.modules.values()
    plain = reference(model, inputs)
    with recording(module, model.plan) as amax:
        reference(model, inputs)
    module.to(dtype)
    spec, cast_inputs = ParallelSpec.of("ulysses", 2), cast(specimen, inputs, dtype)
    case = export_case(
        model,
        cast_inputs,
        spec,
        weights_as_inputs=False,
        change=lambda m: quantize(m, model.plan, amax, kind),  # type: ignore[arg-type]
    )
    assert case.exported.graph.weights == ()
    prediction = case.predictions(cast_inputs)[1]
    quantize(module, model.plan, amax, kind)  # type: ignore[arg-type]
    quantized = reference(model, cast_inputs).float()
    # in float32: in half precision, rounding moves values over a quantization step and causes errors as large
    assert relative_error(prediction, quantized) < 0.3 * relative_error(quantized, plain)
    for target in ("sm89", "sm120"):
        text = read_engine_text(build_file(case.exported.graph.serialized(), target))
        assert text is not None
        assert text.collectives == {"all_to_all": 4, "all_gather": 1}


def test_bf16_with_quantized_weights_as_inputs_builds(build_file: Build) -> None:
    specimen = SPECIMENS["flux"]
    model, inputs = specimen.model(), specimen.inputs()
    (module,) = model.modules.values()
    with recording(module, model.plan) as amax:
        reference(model, inputs)
    module.to(torch.bfloat16)
    cast_inputs, spec = cast(specimen, inputs, torch.bfloat16), ParallelSpec.of("allgather_kv", 2)
    case = export_case(model, cast_inputs, spec, change=lambda m: quantize(m, model.plan, amax, "fp8"))
    text = read_engine_text(build_file(case.exported.graph.serialized()))
    assert text is not None
    assert text.num_fused_attentions == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_stay_zeros_in_every_dtype(dtype: torch.dtype) -> None:
    linear = nn.Linear(32, 16, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight[3] = 0
    quantized = QuantizedLinear(linear, 0.0, "int8")
    assert (quantized.weight_scale > 0).all()
    assert quantized.input_scale > 0
    answer = quantized(torch.zeros(4, 32, dtype=dtype))
    assert answer.eq(0).all()
