"""Compare jobs with adapters on quantised weights with weights quantised after merging the adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.quantization.linear import swap_linears
from engines.torch_engine.checks import QUANTISED_TOLERANCE
from pipelines.checkpoint import Checkpoint
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.jobs import BOTH, TOLERANCE, TURNS, Served, Setting, painted
from tests.pipelines.lora.support.tiny_lora import request_of
from tests.pipelines.support.references.own_call import own_state

QUANTISED = {
    "int8, alone": Setting(precision="int8"),
    "fp8, alone": Setting(precision="fp8"),
    "fp8, alone, fast": Setting(precision="fp8", fast=True),
    "fp8, ulysses, fast": Setting(num_ranks=2, precision="fp8", fast=True),
    "int8, tensor": Setting(num_ranks=2, strategy="tensor", precision="int8"),
    "fp8, tensor, sliced": Setting(num_ranks=2, strategy="tensor", sliced=True, precision="fp8"),
    "fp8, pipeline": Setting(num_ranks=2, strategy="pipeline", precision="fp8"),
}


QUICK = {
    ("flux", "int8, tensor"),
    ("flux", "fp8, ulysses, fast"),
    ("flux", "fp8, tensor, sliced"),
    ("flux", "fp8, pipeline"),
    ("wan", "fp8, alone"),
    ("z image", "fp8, alone, fast"),
}
"""Each setting once; int8 on one rank has its own test."""
MODELS_OF_ONE_SETTING = [
    ("flux2 klein", "fp8, alone, fast"),
    ("qwen", "fp8, alone, fast"),
    ("wan", "fp8, alone"),
    ("z image", "fp8, alone, fast"),
]
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in [*(("flux", name) for name in QUANTISED), *MODELS_OF_ONE_SETTING]
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_quantised_weights_follow(model: str, name: str, served: Callable[[str], Served]) -> None:
    """Weights equal those quantised after merging each job's adapters."""
    here, setting = served(model), QUANTISED[name]
    ranks, plain_one = gang(setting.num_ranks), request_of(here.folder)
    requests = [request_of(here.folder, loras) for loras in TURNS]
    named = ranks.run(painted, here.folder, here.named, requests, setting)
    always = ranks.run(painted, here.folder, here.always, [plain_one], setting)
    never = ranks.run(painted, here.folder, (), [plain_one], setting)
    for latents, (with_both,), (with_none,) in zip(named, always, never, strict=True):
        plain, one, both, *rest = latents
        assert plain.equal(with_none), "adapters that are not asked for change nothing"
        assert both.equal(with_both)
        assert all(mine.equal(again) for mine, again in zip(rest, (plain, one, plain), strict=True))
        for mine, request in zip((plain, one, both), requests, strict=False):
            assert relative_difference(mine, here.expected(request)) <= QUANTISED_TOLERANCE
            assert relative_difference(mine, here.expected(request)) > 10 * TOLERANCE, "it is quantised"


def test_a_quantised_model_equals_diffusers_adapter_beside_the_same_layers(served: Callable[[str], Served]) -> None:
    """The reference fuses the adapter by diffusers, then quantises the same linears of its pipeline."""
    here = served("flux")
    request = request_of(here.folder, BOTH)
    plan = Checkpoint(here.folder).denoiser().plan

    def change(pipeline: Any) -> None:
        for lora, path in zip(BOTH, (here.one, here.two), strict=True):
            pipeline.load_lora_weights(str(path), adapter_name=lora.name)
        pipeline.set_adapters([lora.name for lora in BOTH], [lora.scale for lora in BOTH])
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        swap_linears(pipeline.transformer, plan, "int8")

    expected: Tensor = own_state(here.folder, replace(request, loras=()), change=change).get("latents")
    ((mine,),) = gang(1).run(painted, here.folder, here.named, [request], Setting(precision="int8"))
    assert relative_difference(mine, expected) <= 1e-2, "of two nearly equal numbers one may be rounded up"
    assert relative_difference(mine, here.expected(request)) > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["blocks", "fast"])
def test_captured_steps_follow_quantised_weights(fast: bool, served: Callable[[str], Served]) -> None:
    """The reference is the CPU in bfloat16: PyTorch draws other noise in float32."""
    here = served("flux")
    requests = [request_of(here.folder, loras) for loras in TURNS]
    setting = Setting(precision="fp8", dtype=torch.bfloat16)
    on_cpu = painted(here.folder, here.named, requests, setting)
    on_gpu = painted(here.folder, here.named, requests, replace(setting, fast=fast, device="cuda"))
    assert all(relative_difference(*pair) <= QUANTISED_TOLERANCE for pair in zip(on_gpu, on_cpu, strict=True))
    plain, one, _, again, one_again, last = on_gpu
    assert relative_difference(one, plain) > 0.05
    for mine, other in ((again, plain), (one_again, one), (last, plain)):
        assert relative_difference(mine, other) < 1e-2, "a step as it comes, and one that is replayed"
