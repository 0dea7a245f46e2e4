"""Hand-ordered steps of FLUX.2 and 3, Qwen-Image and Z-Image give their module's answer, alone and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.core.model import LowRank
from engines.core.tensors import relative_difference
from engines.fast.records import EPS
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.fast_step import FastStep
from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine
from tests.engines.support.gloo import gang
from tests.pipelines.support.checkpoints import tiny, tiny_flux3, tiny_pictures, tiny_qwen
from tests.pipelines.support.checkpoints.first_steps import first_step

BOUND = 1e-5
MAKERS: dict[str, Callable[[Path], Path]] = {
    "flux2 dev": tiny_pictures.flux2_dev,
    "flux2 klein": tiny_pictures.flux2_klein,
    "flux3": tiny_flux3.flux3,
    "flux3 distilled, two pictures": tiny_flux3.flux3_distilled,
    "qwen": tiny_qwen.qwen,
    "qwen edit": tiny_qwen.qwen_edit,
    "z image": tiny_pictures.z_image,
}
PICTURES = {"flux3 distilled, two pictures": 2}
DIVIDED = ["flux2 dev", "qwen edit", "z image", *PICTURES]
STRATEGIES = [("ulysses", 2), ("ring", 2), ("hybrid", 4)]


@pytest.fixture(scope="module")
def folder_of(folders: Callable[[Any], Path]) -> Callable[[str], Path]:
    return lambda name: folders(MAKERS[name])


def expected(folder: Path, num_pictures: int | None = None) -> tuple[Tensor, ...]:
    return PlainEngine(model=Checkpoint(folder).denoiser()).predict(first_step(folder, num_pictures))


def predicted(
    folder: Path, strategy: str, precision: str = "native", num_pictures: int | None = None
) -> tuple[tuple[Tensor, ...], int]:
    """Return the answers, and how often a hand-ordered step ran."""
    ranks = tuple(range(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1))
    engine = TorchEngine(Checkpoint(folder).denoiser(), strategy=strategy, precision=precision, fast=True)
    with patch.object(FastStep, "__call__", autospec=True, side_effect=FastStep.__call__) as step:
        return engine.predict(first_step(folder, num_pictures), ranks), step.call_count


def with_divided_text(*arguments: Any) -> tuple[tuple[Tensor, ...], int]:
    """Predict as with a long prompt: each rank has a share of the text from the start."""
    with patch("pipelines.models.flux3.fast.MAX_WHOLE_TEXT", 0):
        return predicted(*arguments)


def without_exchange(folder: Path) -> tuple[Tensor, ...]:
    with patch("engines.torch_engine.exchange.heads.start_all_to_all", lambda x, axis: x.clone()):
        return predicted(folder, "ulysses")[0]


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_equals_the_module(name: str, folder_of: Callable[[str], Path]) -> None:
    folder, num_pictures = folder_of(name), PICTURES.get(name)
    answers, num_steps = predicted(folder, "ulysses", "native", num_pictures)
    assert num_steps == len(answers) == len(first_step(folder, num_pictures))
    assert max(map(relative_difference, answers, expected(folder, num_pictures))) <= BOUND


@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_equal_the_module(name: str, strategy: str, num_ranks: int, folder_of: Callable[[str], Path]) -> None:
    folder, num_pictures = folder_of(name), PICTURES.get(name)
    for answers, num_steps in gang(num_ranks).run(predicted, folder, strategy, "native", num_pictures):
        assert num_steps == len(answers)
        assert max(map(relative_difference, answers, expected(folder, num_pictures))) <= BOUND


@pytest.mark.parametrize("num_pictures", [0, 2])
def test_ranks_may_have_shares_of_the_text_in_its_own_blocks(
    num_pictures: int, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("flux3")
    for answers, num_steps in gang(2).run(with_divided_text, folder, "ulysses", "native", num_pictures):
        assert num_steps == len(answers)
        assert max(map(relative_difference, answers, expected(folder, num_pictures))) <= BOUND


@pytest.mark.parametrize("make", [tiny.flux, *map(MAKERS.get, ["flux2 dev", "flux3", "qwen", "z image"])])
@torch.no_grad()
def test_adapters_may_change_every_parameter(make: Any, folders: Callable[[Any], Path]) -> None:
    """They may do so after the engine has arranged the weights, such as stacked norms of queries and keys."""
    model, changed, branch = *(Checkpoint(folders(make)).denoiser() for _ in range(2)), first_step(folders(make))[0]
    products: dict[str, LowRank] = {}
    for name, x in changed.modules["transformer"].named_parameters():
        product = LowRank(up_NR=0.2 * torch.randn(len(x), 1), down_RK=0.2 * torch.randn(1, x[0].numel()))
        products[name] = product
        x.add_((product.up_NR @ product.down_RK).view(x.shape))
    engine = TorchEngine(replace(model, additions={"own": {"transformer": products}}), fast=True)
    engine.predict((branch,), (0,))
    (answer,) = engine.predict((replace(branch, additions=(("own", 1.0),)),), (0,))
    (expected,) = PlainEngine(model=changed).predict((branch,))
    assert relative_difference(answer, expected) <= BOUND


@pytest.mark.parametrize("name", ["flux2 dev", "flux3", "qwen", "z image"])
def test_a_broken_exchange_shows(name: str, folder_of: Callable[[str], Path]) -> None:
    for answers in gang(2).run(without_exchange, folder_of(name)):
        assert max(map(relative_difference, answers, expected(folder_of(name)))) > 1000 * BOUND


@pytest.mark.parametrize("name", ["flux2 dev", "flux3", "qwen", "z image"])
def test_fp8_is_close(name: str, folder_of: Callable[[str], Path]) -> None:
    answers, num_steps = predicted(folder_of(name), "ulysses", "fp8")
    assert num_steps == len(answers)
    assert 1e-4 < max(map(relative_difference, answers, expected(folder_of(name)))) < 0.1


def test_editors_of_other_kinds_run_as_their_module() -> None:
    """A transformer whose pictures have a time of their own has no hand-ordered step."""
    spec: Any = Checkpoint.of_configuration("Qwen-Image").spec
    assert spec.fast_weights({"zero_cond_t": False}) is not None
    assert spec.fast_weights({"zero_cond_t": True}) is None


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("FLUX.2-dev", {"eps": EPS}, {"eps": 10 * EPS}),
        ("flux-3-image-klein", {"eps": EPS}, {"eps": 10 * EPS}),
        ("Z-Image", {"norm_eps": 1e-5}, {"norm_eps": 1e-6}),  # in diffusers' class that of q and k stays 1e-5
        ("Z-Image", {"qk_norm": True}, {"qk_norm": False}),
    ],
)
def test_norms_of_another_kind_run_as_their_module(name: str, usual: Any, other: Any) -> None:
    spec: Any = Checkpoint.of_configuration(name).spec
    assert spec.fast_weights(usual) is not None
    assert spec.fast_weights(other) is None
