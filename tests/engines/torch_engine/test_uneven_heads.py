"""A model with six heads runs on four ranks, through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.engine import RankContext
from engines.core.model import DenoiserModel
from engines.core.tensors import relative_difference
from engines.registry import load_engine
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import PARTS_FROM_TOKENS, where_even
from pipelines.models.mmdit import FastMMDiT
from tests.engines.support import models
from tests.engines.support.gloo import gang

EVERYONE = (0, 1, 2, 3)


def six_heads() -> Any:
    return models.flux(num_heads=6, num_blocks=1)


@cache
def model() -> DenoiserModel:
    from tests.support.flux_denoiser import as_denoiser

    return as_denoiser(six_heads())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("strategy", ["ulysses", "ulysses in parts", "hybrid", "auto"])
def test_equals_the_unsharded_module(strategy: str, fast: bool) -> None:
    for answer in gang(4).run(predict, strategy, fast):
        assert relative_difference(answer, expected()) <= 1e-5


@pytest.mark.parametrize("fast", [True, False])
def test_control_with_an_exchange_left_out_fails(fast: bool) -> None:
    for answer in gang(4).run(predict, "ulysses", fast, True):
        assert relative_difference(answer, expected()) > 0.01


def test_float8_of_uneven_heads_is_that_of_one_rank() -> None:
    for answer, alone in gang(4).run(in_float8):
        assert relative_difference(answer, alone) <= 1e-3


def test_the_gang_passes_its_checks_at_start() -> None:
    gang(4).run(start)


def test_others_than_peers_take_what_peers_do_not() -> None:
    """Each kernel answers with its number."""

    def numbered(number: int) -> Kernel:
        return lambda q, k, v, *, mask_BM=None, prefix=None: (q.new_tensor(number), q)

    kernel = where_even(numbered(1), numbered(2), num_ranks=4)
    eight, six, two = (torch.zeros(1, 3, heads, 8) for heads in (8, 6, 2))
    four_keys = torch.zeros(1, 5, 4, 8)
    assert kernel(eight, eight, eight)[0] == 1
    assert kernel(eight, four_keys, four_keys)[0] == 1
    assert kernel(six, six, six)[0] == 2
    assert kernel(eight, two, two)[0] == 2
    assert kernel(eight, eight, eight, mask_BM=torch.ones(1, 3, dtype=torch.bool))[0] == 1
    assert kernel(eight, eight, eight, prefix=Prefix(torch.arange(3) + 1, torch.arange(3)))[0] == 2


@cache
def expected() -> Tensor:
    (branch,) = models.branches("flux", "uneven")
    with torch.no_grad():
        prediction: Tensor = six_heads()(**branch.inputs, return_dict=False)[0]
    return prediction


def predict(strategy: str, fast: bool, broken: bool = False) -> Tensor:
    engine = TorchEngine(model(), strategy=strategy.split()[0], fast=fast)
    with no_exchange(broken), in_parts("in parts" in strategy):
        with patch("pipelines.models.mmdit.FastMMDiT.step", autospec=True, side_effect=FastMMDiT.step) as step:
            (prediction,) = engine.predict(models.branches("flux", "uneven"), EVERYONE)
        assert bool(step.call_count) == fast
    engine.close()
    return prediction


def in_float8() -> tuple[Tensor, Tensor]:
    """Return the answers of the gang and of a single rank."""
    engine = TorchEngine(model(), strategy="ulysses", fast=True, precision="fp8")
    answers = tuple(
        engine.predict(models.branches("flux", "uneven"), ranks)[0] for ranks in (EVERYONE, (dist.get_rank(),))
    )
    engine.close()
    return answers[0], answers[1]


def start() -> None:
    context = RankContext(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device="cpu")
    load_engine("torch", model(), context, strategy="ulysses").close()


@contextmanager
def no_exchange(broken: bool) -> Iterator[None]:
    if not broken:
        yield
        return
    with (
        patch("engines.torch_engine.exchange.heads.start_all_to_all", lambda x, axis: x),
        patch("engines.parallel.ulysses.all_to_all", lambda x, axis: x),
    ):
        yield


@contextmanager
def in_parts(wanted: bool) -> Iterator[None]:
    with patch("engines.torch_engine.exchange.choose.PARTS_FROM_TOKENS", 1 if wanted else PARTS_FROM_TOKENS):
        yield
