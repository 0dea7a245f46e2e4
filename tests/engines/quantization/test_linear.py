"""Quantised layers stay close to ``nn.Linear``; the large linears of a plan, and no others, are swapped."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.core.spec import Scheme
from engines.core.tensors import relative_difference
from engines.quantization.calibration import load_calibration, recording, save_calibration
from engines.quantization.linear import LAYERS, QuantLinear, swap_linears
from pipelines.models.flux.spec import SHARD_PLAN
from tests.engines.support import models

ERROR = {"fp8": 0.05, "int8": 0.02}
SCHEMES: tuple[Scheme, ...] = ("fp8", "int8")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_very_different_size_keep_their_precision(scheme: Scheme, bias: bool) -> None:
    linear = nn.Linear(64, 32, bias=bias).requires_grad_(False)
    linear.weight.data *= torch.logspace(-2, 2, 32)[:, None]
    x = torch.randn(3, 40, 64) * torch.logspace(-3, 3, 40)[:, None]
    got, expected = LAYERS[scheme](linear)(x), linear(x)
    # The error bound of a product follows the norms of its factors: the product itself may be close to zero.
    lengths = x.norm(dim=-1, keepdim=True) * linear.weight.norm(dim=-1)
    assert got.shape == expected.shape
    assert ((got - expected).abs() / lengths).max() < ERROR[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fixed_scale_is_used(scheme: Scheme) -> None:
    linear = nn.Linear(32, 16).requires_grad_(False)
    x = torch.randn(50, 32)
    fitting = LAYERS[scheme](linear, float(x.abs().max()))(x)
    too_small = LAYERS[scheme](linear, float(x.abs().max()) / 50)(x)
    assert relative_difference(fitting, linear(x)) < ERROR[scheme]
    assert relative_difference(too_small, linear(x)) > 0.5  # everything is clipped


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_whole_model_stays_close(scheme: Scheme, tmp_path: Path) -> None:
    (branch,) = models.branches("flux", "even")
    module = models.transformer("flux")
    expected = module(**branch.inputs)[0]
    with recording(module, SHARD_PLAN) as amax:
        module(**branch.inputs)
    save_calibration({"transformer": amax}, tmp_path / "scales.json")
    for table in (None, load_calibration(tmp_path / "scales.json", "transformer")):
        swapped = copy.deepcopy(module)
        num_layers = swap_linears(swapped, SHARD_PLAN, scheme, table)
        kinds = {name: isinstance(layer, QuantLinear) for name, layer in swapped.named_modules()}
        assert num_layers == sum(kinds.values()) == 2 * 12 + 2 * 5
        assert not kinds["transformer_blocks.0.norm1.linear"]
        assert not kinds["proj_out"]
        assert relative_difference(swapped(**branch.inputs)[0], expected) < 0.1


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_gives_no_scale(value: float) -> None:
    """Some models exceed float16's largest number: a layer would divide by infinity and paint nothing."""
    (branch,) = models.branches("flux", "even")
    module = models.transformer("flux")
    text = torch.full_like(branch.inputs["encoder_hidden_states"], value)
    with (
        recording(module, SHARD_PLAN),
        pytest.raises(ValueError, match=r"layer transformer_blocks\.0\..* was given (inf|nan), which no scale fits"),
    ):
        module(**{**branch.inputs, "encoder_hidden_states": text})


def test_a_calibration_must_know_every_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no entry for 34 of 34 layers, such as transformer_blocks\.0"):
        swap_linears(models.transformer("flux"), SHARD_PLAN, "fp8", {})
    values = ('"c"', "Infinity", "NaN", "-1")
    for bad in (*(f'{{"a": {{"b": {value}}}}}'.encode() for value in values), b"PK no JSON", b"PK\xff"):
        (tmp_path / "bad.json").write_bytes(bad)
        with pytest.raises(ValueError, match=r"bad\.json is no calibration"):
            load_calibration(tmp_path / "bad.json", "a")
    save_calibration({"transformer": {"a": 1.0}}, tmp_path / "one.json")
    with pytest.raises(ValueError, match="no scales for 'transformer_2', only for: transformer"):
        load_calibration(tmp_path / "one.json", "transformer_2")
