"""The configuration refuses values that cannot work, and each error names what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.core.model import DenoiserModel
from engines.tensorrt_engine import config as config_module
from engines.tensorrt_engine.build.bindings import Bindings, Target, load_bindings
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.rules import TensorRTOptions
from tests.engines.tensorrt_engine.support.zoo import flux_model

SM86, SM89, SM100 = (Target.parse(name) for name in ("sm86", "sm89", "sm100"))


@pytest.fixture(scope="module")
def model() -> Callable[[torch.dtype], DenoiserModel]:
    made = flux_model()

    def of(dtype: torch.dtype) -> DenoiserModel:
        for module in made.modules.values():
            module.to(dtype)
        return made

    return of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "tensor2xulysses2"}, "ignores the groups.*tensor4 or ulysses4 alone"),
        ({"strategy": "tensor2xring2"}, "ignores the groups"),
        ({"strategy": "pipeline"}, "all ranks of a team load one engine file"),
        ({"strategy": "tensor", "options": TensorRTOptions(weights="constants")}, "one engine file per rank"),
        ({"strategy": "magic"}, "unknown strategy"),
        ({"precision": "fp4"}, "knows auto, native, fp8-static, int8-static"),
        ({"precision": "bf16"}, "native computes in the model's dtype, so set that to bfloat16"),
        ({"precision": "int8"}, "fixed scales, so write int8-static"),
    ],
)
def test_refused_when_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorRTConfig(**options)


def test_weights_are_inputs_or_constants() -> None:
    with pytest.raises(ValueError, match="weights is 'elsewhere'; it must be inputs or constants"):
        TensorRTOptions(weights="elsewhere")  # type: ignore[arg-type]


def test_several_ranks_need_a_plan(model: Callable[[torch.dtype], DenoiserModel]) -> None:
    """Otherwise the ranks would do the same work and mistake each other's tokens for their own."""
    planless = replace(flux := model(torch.bfloat16), plan=replace(flux.plan, shards=(), linears=()))
    TensorRTConfig().resolve(planless, 1, SM89)
    with pytest.raises(ValueError, match=r"no plan to divide FluxTransformer2DModel over 2 ranks: .*num_ranks: 1"):
        TensorRTConfig().resolve(planless, 2, SM89)


def test_fp8_needs_a_gpu_that_has_it(model: Callable[[torch.dtype], DenoiserModel]) -> None:
    with pytest.raises(ValueError, match="use int8-static or native"):
        TensorRTConfig(precision="fp8-static").resolve(model(torch.bfloat16), 2, SM86)
    assert TensorRTConfig(precision="fp8-static").resolve(model(torch.bfloat16), 2, SM89).precision == "fp8-static"


def test_one_head_per_rank_is_refused_in_half_precision(model: Callable[[torch.dtype], DenoiserModel]) -> None:
    with pytest.raises(ValueError, match=r"leaves 1 of 8 heads.*allgather_kv"):
        TensorRTConfig(strategy="ulysses").resolve(model(torch.bfloat16), 8, SM89)
    assert TensorRTConfig(strategy="ulysses").resolve(model(torch.float32), 8, SM89).spec.ulysses == 8


def test_auto_keeps_two_heads_per_rank(model: Callable[[torch.dtype], DenoiserModel]) -> None:
    specs = [TensorRTConfig().resolve(model(torch.bfloat16), num_ranks, SM89).spec.name for num_ranks in (1, 2, 4, 8)]
    assert specs == ["single", "ulysses2", "ulysses4", "allgather_kv8"]


def test_native_is_the_models_dtype(model: Callable[[torch.dtype], DenoiserModel]) -> None:
    for precision in ("auto", "native"):
        assert TensorRTConfig(precision=precision).resolve(model(torch.float16), 2, SM89).precision == "float16"


def test_ring_is_native_only_where_tensorrt_has_it(
    model: Callable[[torch.dtype], DenoiserModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = TensorRTConfig(strategy="ring")
    assert ring.resolve(model(torch.bfloat16), 2, SM89).ring == "segments"
    assert TensorRTConfig(strategy="hybrid").resolve(model(torch.bfloat16), 4, SM89).ring == "none"
    rtx = Bindings(module=load_bindings().module, product="tensorrt_rtx", version="1")
    monkeypatch.setattr(config_module, "load_bindings", lambda: rtx)
    assert ring.resolve(model(torch.bfloat16), 2, SM100).ring == "segments"
    full = Bindings(module=load_bindings().module, product="tensorrt", version="11")
    monkeypatch.setattr(config_module, "load_bindings", lambda: full)
    assert ring.resolve(model(torch.bfloat16), 2, SM100).ring == "native"
    assert ring.resolve(model(torch.bfloat16), 2, SM89).ring == "segments"
