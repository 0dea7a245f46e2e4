"""Quantised weights replace the loaded ones, one layer after another, from the host."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from engines.core.model import DenoiserModel, LowRank, device_of
from engines.core.tensors import relative_difference
from engines.parallel.self_check import WrongAnswerError
from engines.parallel.sharded import ShardedModel
from engines.parallel.weight_files import WeightFiles
from engines.quantization.linear import swap_linears, weights_to_quantise
from engines.torch_engine.checks import check_fast_path
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.steps import StepRunner
from pipelines.blocks.footprint import ForwardMeter
from tests.engines.support import models
from tests.support.flux_denoiser import as_denoiser

GPU = torch.device("meta")
"""Tensors moved there stand for tensors on a GPU."""
CHANGED = "transformer_blocks.0.attn.to_q.weight"
WORKSPACE = 4
"""Unquantised weights of one layer at a time: its copy, and float32 values while it is quantised."""


def on_host() -> DenoiserModel:
    """Return a model with its large weights on the host and all others on the fake GPU."""
    model = as_denoiser(models.flux(num_blocks=4))
    module = model.modules["transformer"]
    large = weights_to_quantise(module, model.plan)
    for name, parameter in list(module.named_parameters()):
        if name not in large:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(parameter.to(GPU), requires_grad=False))
    return model


def planned(module: nn.Module, model: DenoiserModel) -> dict[str, Tensor]:
    return {name: x for name, x in module.named_parameters() if name in weights_to_quantise(module, model.plan)}


def quantise(model: DenoiserModel, precision: str, *, fast: bool) -> object:
    module = model.modules["transformer"]
    if not fast:
        with GPU:
            return swap_linears(module, model.plan, "int8" if precision == "int8" else "fp8")
    config = TorchChoices(precision=precision, fast=True)
    return StepRunner(model, ShardedModel(model), config=config, device=GPU).weights("transformer")


@pytest.mark.parametrize(("precision", "fast"), [("int8", False), ("fp8", False), ("fp8", True)])
def test_a_gpu_holds_the_result_and_one_layer_at_most(precision: str, fast: bool) -> None:
    model = on_host()
    module = model.modules["transformer"]
    assert device_of(module) == model.device == GPU
    sizes = [x.nbytes for x in planned(module, model).values()]
    with ForwardMeter() as meter:
        result = quantise(model, precision, fast=fast)
    held = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in module.buffers()}.values())
    assert result
    assert not planned(module, model)
    assert sum(sizes) // 4 <= held < sum(sizes) // 3, "a byte for each value, and the scales"
    assert held <= meter.peak_bytes <= held + WORKSPACE * max(sizes) < sum(sizes)


@pytest.mark.parametrize("fast", [False, True])
def test_only_weights_that_an_adapter_changes_are_held(fast: bool) -> None:
    model = models.model.__wrapped__("flux")
    (branch,) = models.branches("flux", "even")
    module = model.modules["transformer"]
    weak: Any = StorageWeakRef
    loaded = {name: weak(x.untyped_storage()) for name, x in planned(module, model).items()}
    low_rank = LowRank(up_NR=torch.ones(128, 1), down_RK=torch.ones(1, 128), scale=0.1)
    model = replace(model, additions={"one": {"transformer": {CHANGED: low_rank}}})
    with closing(TorchEngine(model, precision="fp8", fast=fast)) as engine:
        (plain,) = engine.predict((branch,), (0,))
        (added,) = engine.predict((replace(branch, additions=(("one", 1.0),)),), (0,))
        (again,) = engine.predict((branch,), (0,))
        assert [name for name, storage in loaded.items() if not storage.expired()] == [CHANGED]
    assert relative_difference(added, plain) > 1e-3
    assert again.equal(plain)


def test_a_later_engine_on_the_same_modules_has_their_adapters() -> None:
    """The first engine has replaced the layers that the adapter changes."""
    low_rank = LowRank(up_NR=torch.ones(128, 1), down_RK=torch.ones(1, 128), scale=0.1)
    additions = {"one": {"transformer": {CHANGED: low_rank}}}
    model = replace(models.model.__wrapped__("flux"), additions=additions)
    (branch,) = models.branches("flux", "even")
    answers: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        with closing(TorchEngine(model, precision="int8", fast=False)) as engine:
            mixes = ((), (("one", 1.0),))
            answers.append(tuple(engine.predict((replace(branch, additions=mix),), (0,))[0] for mix in mixes))
    assert not torch.equal(*answers[0])
    assert all(map(torch.equal, *answers))


def test_a_module_computes_with_the_quantised_values() -> None:
    model = models.model.__wrapped__("flux")
    (branch,) = models.branches("flux", "even")
    expected = model.forward(model.modules["transformer"], branch.arguments)
    with closing(TorchEngine(model, precision="fp8", fast=True)) as engine:
        (fast,) = engine.predict((branch,), (0,))
    module: Any = model.forward(model.modules["transformer"], branch.arguments)
    assert 1e-4 < relative_difference(module, expected) < 0.1
    assert relative_difference(module, fast) < relative_difference(fast, expected)


def test_wrong_quantised_weights_stop_a_gang() -> None:
    model = models.model.__wrapped__("flux")
    model = replace(model, probe=lambda: models.branches("flux", "even"))
    with closing(TorchEngine(model, precision="fp8", fast=True)) as engine:
        assert check_fast_path(engine, model, rank=0)["weights"] < 0.05
        broken = "engines.torch_engine.checks.quantize_weight"
        with patch(broken, lambda weight_NK, dtype, into: into.scale_R1.fill_(1.0)), pytest.raises(WrongAnswerError):
            check_fast_path(engine, model, rank=0)


def test_a_rank_that_reads_its_share_leaves_large_weights_on_the_host(tmp_path: Path) -> None:
    whole = models.model.__wrapped__("flux")
    module: Any = whole.modules["transformer"]
    names = weights_to_quantise(module, whole.plan)
    module.save_pretrained(tmp_path)
    with torch.device("meta"):
        outline = as_denoiser(models.flux())
    model = replace(outline, weights=WeightFiles(folders={"transformer": tmp_path}, device=torch.device("cpu")))
    (branch,) = models.branches("flux", "even")
    reads = patch.object(WeightFiles, "fill", autospec=True, side_effect=WeightFiles.fill)
    answers: list[Tensor] = []
    for each in (whole, model):
        with reads as fill, closing(TorchEngine(each, precision="int8")) as engine:
            answers += engine.predict((branch,), (0,))
            assert [call.kwargs["on_host"] for call in fill.call_args_list] == [names] * (each is model)
    assert answers[0].equal(answers[1])
