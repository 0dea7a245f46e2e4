"""The fused elementwise steps equal PyTorch's own modules, and Triton's versions equal the plain ones.

Triton runs on CPU tensors only under its interpreter, which must be chosen before it is imported: its part of this test
runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import LowRank
from engines.fast import weight_sums
from engines.fast.kernels import (
    HeadNorms,
    Modulation,
    add_normed,
    gated,
    group_norm,
    norm_and_rotate,
    norm_modulate,
    quantize_rows,
    quantize_weight,
    scaled_norm,
)
from engines.fast.kernels import residual_norm_modulate as residual
from engines.fast.records import QuantRows, quantized
from engines.quantization.linear import FP8
from tests.support.patience import PATIENCE_S

BATCH, TEXT, IMAGE, CHANNELS = 2, 3, 5, 24
ROWS = BATCH * (TEXT + IMAGE)
SUPPORT = Path(__file__).parent / "support"
TRITON_APART = Path(sys.prefix, "triton")
"""The folder in which `make venv` installs it."""


def vectors(segments: int = 2) -> Tensor:
    return torch.randn(segments, BATCH, CHANNELS)


def expected_norm(x_RC: Tensor, shift_SBC: Tensor, scale_SBC: Tensor) -> Tensor:
    """Return the norm by batch entry and stream, like a block."""
    x_LBC = x_RC.view(-1, BATCH, CHANNELS)
    streams = []
    for stream_LBC, shift_BC, scale_BC in zip((x_LBC[:TEXT], x_LBC[TEXT:]), shift_SBC, scale_SBC, strict=True):
        normed = nn.LayerNorm(CHANNELS, elementwise_affine=False, eps=1e-6)(stream_LBC)
        streams.append(normed * (1 + scale_BC) + shift_BC)
    return torch.cat(streams).reshape(ROWS, CHANNELS)


def test_norm_modulate_takes_each_streams_and_entrys_own_vectors() -> None:
    x_RC, shift_SBC, scale_SBC = torch.randn(ROWS, CHANNELS), vectors(), vectors()
    result = norm_modulate(x_RC, Modulation(shift_SBC=shift_SBC, scale_SBC=scale_SBC, first_rows=BATCH * TEXT))
    torch.testing.assert_close(result, expected_norm(x_RC, shift_SBC, scale_SBC))


def test_residual_is_added_in_place_before_the_norm() -> None:
    x_RC, y_RC, z_RC = (torch.randn(ROWS, CHANNELS) for _ in range(3))
    gate_SBC, shift_SBC, scale_SBC = vectors(), vectors(), vectors()
    gates = torch.cat((gate_SBC[0].repeat(TEXT, 1), gate_SBC[1].repeat(IMAGE, 1)))
    sum_RC = x_RC + gates * (y_RC + z_RC)
    modulation = Modulation(shift_SBC=shift_SBC, scale_SBC=scale_SBC, first_rows=BATCH * TEXT)
    result = residual(x_RC, (y_RC, z_RC), gate_SBC, modulation)
    torch.testing.assert_close(x_RC, sum_RC)
    torch.testing.assert_close(result, expected_norm(sum_RC, shift_SBC, scale_SBC))


def test_gate_with_two_segments_meets_modulation_with_one() -> None:
    x_RC, y_RC = torch.randn(ROWS, CHANNELS), torch.randn(ROWS, CHANNELS)
    gate_SBC, one_SBC = vectors(), vectors(1)
    modulation = Modulation(shift_SBC=one_SBC, scale_SBC=one_SBC, first_rows=BATCH * TEXT)
    gates = torch.cat((gate_SBC[0].repeat(TEXT, 1), gate_SBC[1].repeat(IMAGE, 1)))
    expected = expected_norm(x_RC + gates * y_RC, one_SBC.expand(2, -1, -1), one_SBC.expand(2, -1, -1))
    torch.testing.assert_close(residual(x_RC, (y_RC,), gate_SBC, modulation), expected)


def test_three_streams_have_vectors_of_their_own() -> None:
    x_RC, y_RC, last = torch.randn(ROWS, CHANNELS), torch.randn(ROWS, CHANNELS), 2
    gate_SBC, shift_SBC, scale_SBC = vectors(3), vectors(3), vectors(3)
    numbers = [0] * TEXT + [1] * (IMAGE - last) + [2] * last
    gate_RC, shift_RC, scale_RC = (x_SBC[numbers].flatten(0, 1) for x_SBC in (gate_SBC, shift_SBC, scale_SBC))
    sum_RC = x_RC + gate_RC * y_RC
    modulation = Modulation(shift_SBC=shift_SBC, scale_SBC=scale_SBC, first_rows=BATCH * TEXT, last_rows=BATCH * last)
    expected = functional.layer_norm(sum_RC, (CHANNELS,), eps=1e-6) * (1 + scale_RC) + shift_RC
    torch.testing.assert_close(residual(x_RC, (y_RC,), gate_SBC, modulation), expected)


def test_add_normed_norms_the_update_and_the_sum() -> None:
    x_RC, y_RC, (gate_BC, scale_BC) = torch.randn(ROWS, CHANNELS), torch.randn(ROWS, CHANNELS), vectors()
    norm = nn.RMSNorm(CHANNELS, eps=1e-3, elementwise_affine=False)
    gate_RC, scale_RC = (vector_BC.repeat(ROWS // BATCH, 1) for vector_BC in (gate_BC, scale_BC))
    torch.testing.assert_close(scaled_norm(x_RC, scale_BC, eps=1e-3), norm(x_RC) * scale_RC)
    sum_RC = x_RC + gate_RC * norm(y_RC)
    result = add_normed(x_RC, y_RC, gate_BC, scale_BC, eps=1e-3)
    torch.testing.assert_close(x_RC, sum_RC)
    torch.testing.assert_close(result, norm(sum_RC) * scale_RC)


def test_norm_and_rotate_equals_diffusers() -> None:
    heads, dim, length = 6, 8, TEXT + IMAGE
    qkv_R3HD = torch.randn(length * BATCH, 3, heads, dim)
    weight_S2D = torch.randn(2, 2, dim)
    angles = torch.randn(length, dim // 2)
    norms = HeadNorms(weight_S2D=weight_S2D, cos_LP=angles.cos(), sin_LP=angles.sin(), first_rows=BATCH * TEXT)
    parts = torch.empty(3, length, BATCH, 3, 2, dim)  # three destinations, two heads each
    norm_and_rotate(qkv_R3HD, norms, parts.permute(1, 2, 3, 0, 4, 5))
    got_BL3HD = parts.permute(2, 1, 3, 0, 4, 5).flatten(3, 4)
    qkv_BL3HD = qkv_R3HD.view(length, BATCH, 3, heads, dim).transpose(0, 1)
    tables = (angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1))
    for which in range(2):
        x_BLHD = qkv_BL3HD[:, :, which]
        text = functional.rms_norm(x_BLHD[:, :TEXT], (dim,), weight_S2D[0, which], 1e-6)
        image = functional.rms_norm(x_BLHD[:, TEXT:], (dim,), weight_S2D[1, which], 1e-6)
        expected = apply_rotary_emb(torch.cat((text, image), 1), tables, sequence_dim=1)
        torch.testing.assert_close(got_BL3HD[:, :, which], expected)
    torch.testing.assert_close(got_BL3HD[:, :, 2], qkv_BL3HD[:, :, 2])


def test_gated_is_flux2s_activation() -> None:
    x = torch.randn(5, 12)
    torch.testing.assert_close(gated(x), Flux2SwiGLU()(x))


@pytest.mark.parametrize("gelu", [False, True])
def test_quantize_rows_joins_groups(gelu: bool) -> None:
    x_GRC = torch.randn(4, 7, 6) * torch.logspace(-3, 2, 7)[None, :, None]
    rows = quantize_rows(x_GRC, gelu=gelu)
    joined = torch.cat(tuple(x_GRC), dim=1)
    joined = functional.gelu(joined, approximate="tanh") if gelu else joined
    assert rows.values_RC.float().abs().amax(1).allclose(torch.tensor(448.0))
    largest = joined.abs().amax(1, keepdim=True)
    assert ((rows.dequantized() - joined).abs() / largest).max() < 2**-4  # half a step of a 3-bit mantissa


def test_weights_are_rounded_before_they_are_quantised() -> None:
    weight = torch.randn(3, 8)
    into = QuantRows(values_RC=torch.empty(3, 8).to(FP8), scale_R1=torch.empty(1, 3).t())
    quantize_weight(weight, torch.bfloat16, into)
    expected = quantized(weight.bfloat16())
    assert into.values_RC.float().equal(expected.values_RC.float())
    assert into.scale_R1.equal(expected.scale_R1)
    assert not into.scale_R1.equal(quantized(weight).scale_R1)


def test_zero_rows_stay_zero() -> None:
    assert not quantize_rows(torch.zeros(2, 8)).dequantized().any()


def test_quantised_norm_is_the_norm_quantised() -> None:
    modulation = Modulation(shift_SBC=vectors(), scale_SBC=vectors(), first_rows=BATCH * TEXT)
    x_RC = torch.randn(ROWS, CHANNELS)
    rows, plain = norm_modulate(x_RC, modulation, quantize=True), norm_modulate(x_RC, modulation)
    assert isinstance(rows, QuantRows)
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(rows.dequantized(), plain, rtol=2**-4, atol=0.02)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None or TRITON_APART.is_dir()


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed; `make venv` does that")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, test_gpu.py runs them compiled")
@pytest.mark.parametrize("program", ["triton_check.py", "weight_sums_check.py"])
def test_triton_versions_equal_the_plain_ones(program: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TRITON_APART)}
    command = [sys.executable, str(SUPPORT / program), "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_group_norm_is_launched_on_the_device_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, and a decoder with several GPUs need not begin with the first."""
    entered = MagicMock()
    launch = Mock(side_effect=lambda *_, **__: entered.return_value.__exit__.assert_not_called())
    monkeypatch.setitem(sys.modules, "engines.fast.triton_group_norm", SimpleNamespace(launch_group_norm=launch))
    monkeypatch.setattr(torch.cuda, "device", entered)
    group_norm(Mock(is_cuda=True, device=torch.device("cuda", 1)), nn.GroupNorm(2, 4), silu=True)
    entered.assert_called_once_with(torch.device("cuda", 1))
    entered.return_value.__enter__.assert_called_once_with()
    launch.assert_called_once()


@pytest.mark.parametrize(
    ("capability", "hip", "is_installed", "expected"),
    [
        ((8, 0), None, True, True),
        ((9, 0), None, True, True),
        ((7, 5), None, True, False),
        ((9, 4), "6.4", True, False),
        ((9, 0), None, False, False),
    ],
)
def test_gpus_that_cannot_run_the_kernel_of_sums_add_products_without_it(
    capability: tuple[int, int], hip: str | None, is_installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turing multiplies no bfloat16, and a package of PyTorch may come without Triton."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(weight_sums, "has_triton", lambda: is_installed)
    weight_sums.has_kernel.cache_clear()
    try:
        products = [(1.0, LowRank(up_NR=torch.ones(8, 8).bfloat16(), down_RK=torch.ones(8, 8).bfloat16()))]
        assert weight_sums.fits(torch.zeros(8, 8).half(), products, torch.device("cuda", 0)) == expected
    finally:
        weight_sums.has_kernel.cache_clear()
