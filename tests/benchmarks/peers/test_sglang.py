"""SGLang's transformers in the dtypes of its pipelines, and replacements of its compiled kernels."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.models.making import without_init
from benchmarks.peers import sglang
from benchmarks.peers.sglang_models import call_of

ATTENTION = """
def _flash_attn_forward(q, k, v, softmax_scale, **lengths):
    return lengths or softmax_scale, -softmax_scale, None, None
"""
UNLOADABLE = "raise ImportError('undefined symbol')"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install a ``sgl_kernel`` whose libraries cannot be loaded, with one module that needs none."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(UNLOADABLE)
    (package / "scalar_type.py").write_text("scalar_types = 'plain Python'")
    (tmp_path / "fa3_fwd_interface.py").write_text(ATTENTION)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sgl_kernel", "sgl_kernel.flash_attn", "sgl_kernel.scalar_type", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    sglang._make_kernels_importable()


@pytest.mark.usefixtures("kernels")
def test_kernels_that_cannot_be_loaded_can_be_imported_and_not_called() -> None:
    from sgl_kernel import gelu_and_mul  # type: ignore[import-not-found]

    with pytest.raises(NotImplementedError, match="SGLang's kernel gelu_and_mul"):
        gelu_and_mul(1, 2)


@pytest.mark.usefixtures("kernels")
def test_what_needs_no_library_is_theirs_and_attention_is_that_of_fa3_fwd() -> None:
    from sgl_kernel.flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    from sgl_kernel.scalar_type import scalar_types  # type: ignore[import-not-found]

    assert scalar_types == "plain Python"
    x = torch.zeros(1, 2, 3, 16)
    usual = {"causal": False, "cu_seqlens_q": None}
    assert flash_attn_varlen_func(x, x, x, softmax_scale=None, **usual) == 0.25
    assert flash_attn_varlen_func(x, x, x, softmax_scale=None, return_softmax_lse=True, **usual) == (0.25, -0.25)
    with pytest.raises(AssertionError):
        flash_attn_varlen_func(x, x, x, softmax_scale=None, causal=True)


@pytest.mark.usefixtures("kernels")
def test_packed_sequences_are_told_apart() -> None:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    x, lengths = torch.zeros(5, 3, 16), {"cu_seqlens_k": [0, 2, 5], "max_seqlen_q": 3, "max_seqlen_k": 3}
    found = flash_attn_varlen_func(x, x, x, softmax_scale=None, causal=False, cu_seqlens_q=[0, 2, 5], ver=3, **lengths)
    assert found == {**lengths, "cu_seqlens_q": [0, 2, 5]}


@pytest.mark.usefixtures("kernels")
def test_values_are_gated_by_the_kernel_that_sglang_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_kernel import silu_and_mul

    built = SimpleNamespace(silu_and_mul=lambda x, out: out.copy_(x[:, :2] + 1))
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.activation.activation", built)
    out = torch.zeros(1, 2)
    silu_and_mul(torch.ones(1, 4), out)
    assert out.tolist() == [[2, 2]]


@pytest.mark.usefixtures("kernels")
def test_products_in_float8_have_a_scale_a_row_and_one_a_column() -> None:
    from sgl_kernel import fp8_scaled_mm

    generator = torch.Generator().manual_seed(0)
    a_MK, b_NK, bias_N = (torch.randn(*shape, generator=generator) for shape in ((32, 64), (48, 64), (48,)))
    scale_M, scale_N = (x.abs().amax(dim=1) / 448 for x in (a_MK, b_NK))
    quantized = [(x / scale[:, None]).to(torch.float8_e4m3fn) for x, scale in ((a_MK, scale_M), (b_NK, scale_N))]
    found = fp8_scaled_mm(quantized[0], quantized[1].t(), scale_M, scale_N, torch.bfloat16, bias_N.bfloat16())
    expected = a_MK @ b_NK.t() + bias_N
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.usefixtures("kernels")
def test_rows_are_divided_by_the_root_of_their_mean_square() -> None:
    from sgl_kernel import rmsnorm

    found = rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(found, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


@pytest.mark.usefixtures("kernels")
def test_sums_are_normalized_in_place_by_the_kernel_that_sglang_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_kernel import fused_add_rmsnorm

    def built(x_RC: torch.Tensor, residual_RC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> None:
        residual_RC += x_RC
        x_RC.copy_(weight_C * eps)

    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.layernorm.norm", SimpleNamespace(fused_add_rmsnorm=built))
    x, residual, weight = (torch.full((1, 2), value) for value in (3.0, 4.0, 5.0))
    assert fused_add_rmsnorm(x, residual, weight[0], 0.5) is None
    assert residual.tolist() == [[7.0, 7.0]]
    assert x.tolist() == [[2.5, 2.5]]


def test_what_is_not_there_says_that_it_cannot_be_used() -> None:
    module = sglang._nothing_of("sglang.kernels.rope")
    assert not module.can_use_fused_rope(torch.ones(2), head_dim=1)
    with pytest.raises(NotImplementedError, match="SGLang's kernel fused_rope"):
        module.fused_rope(torch.ones(2))


def test_copies_between_gpus_are_left_out_of_captured_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def is_ready(*words: object, enabled: bool) -> bool:
        asked.append(words)
        return enabled

    copies = SimpleNamespace(ipc_a2a_multi_ready=is_ready)
    monkeypatch.setattr(importlib, "import_module", lambda _: copies)
    sglang._exchange_by_nccl_in_captures()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert copies.ipc_a2a_multi_ready("group", enabled=True) is not captures
    assert asked == [("group",)]


def test_packages_that_are_imported_already_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages = tmp_path / "some_project" / "stages"
    stages.mkdir(parents=True)
    (stages.parent / "__init__.py").write_text("version = 3")
    (stages / "__init__.py").write_text(UNLOADABLE)
    (stages / "loop.py").write_text("steps = 4")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_project", "some_project.stages", "some_project.stages.loop"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    import some_project  # type: ignore[import-not-found]

    without_init("some_project", "some_project.stages")
    from some_project.stages.loop import steps  # type: ignore[import-not-found]

    assert (sys.modules["some_project"], some_project.version, steps) == (some_project, 3, 4)


class Transformer(torch.nn.Module):
    """A transformer like SGLang's: in the default dtype, or in one of its own."""

    param_names_mapping: tuple[str, ...] = ()

    def __init__(self, config: Any, hf_config: Any, quant_config: Any) -> None:
        super().__init__()
        self.scale_shift = torch.nn.Parameter(torch.empty(2))
        self.rope = torch.nn.Parameter(torch.empty(2, dtype=torch.float32))

    def post_load_weights(self) -> None:
        pass

    def forward(self) -> bool:
        return torch.is_autocast_enabled("cpu")


def test_weights_that_diffusers_keeps_in_float32_have_the_dtype_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader casts each to its parameter's dtype. A product of two dtypes, as in Wan's time embedding, fails."""
    mounted: list[Any] = []
    fusions = dict.fromkeys(sglang.FUSIONS, SimpleNamespace(mount=mounted.append))
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops", SimpleNamespace(diffusion=SimpleNamespace(**fusions)))
    utils = {"get_param_names_mapping": lambda *_: None, "hf_to_custom_state_dict": lambda weights, *_: (weights, {})}
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.loader.utils", SimpleNamespace(**utils))
    weights = {"scale_shift": torch.tensor([1.0, 2.0]), "rope": torch.tensor([3.0, 4.0])}
    module = SimpleNamespace(dtype=torch.bfloat16, config={}, state_dict=lambda: weights)
    found = sglang.loaded(Transformer, SimpleNamespace(), module)
    assert (found.scale_shift.dtype, found.scale_shift.tolist()) == (torch.bfloat16, [1, 2])
    assert (found.rope.dtype, found.rope.tolist()) == (torch.float32, [3, 4])
    assert mounted == [found] * len(sglang.FUSIONS)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_calls_in_bfloat16_are_cast(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, autocast: bool) -> None:
    """The dtype of its first parameter does not matter."""
    context = SimpleNamespace(set_forward_context=lambda **_: nullcontext())
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.managers.forward_context", context)
    transformer = Transformer(None, None, None)
    transformer.rope.data = transformer.rope.to(dtype)
    assert call_of(transformer, autocast=autocast)() is (autocast and dtype == torch.bfloat16)
