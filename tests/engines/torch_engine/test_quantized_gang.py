"""Quantised layers run on several ranks, with every division of weights, alike on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import RankContext
from engines.core.model import DenoiserModel, with_attention
from engines.core.tensors import relative_difference
from engines.parallel.self_check import WrongAnswerError
from engines.parallel.weight_files import WeightFiles
from engines.quantization.calibration import recording, save_calibration
from engines.quantization.linear import QuantLinear
from engines.registry import load_engine
from engines.torch_engine.checks import MAX_ATTENTION_ERROR
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from tests.engines.support import models
from tests.engines.support.gloo import gang

NUM_LINEARS = 2 * 12 + 2 * 5


@pytest.mark.parametrize(
    ("strategy", "precision", "attention"),
    [("ulysses", "int8", "auto"), ("ulysses", "fp8", "fp8"), ("tensor", "int8", "auto"), ("ring", "native", "fp8")],
)
def test_a_sound_gang_passes_its_check(strategy: str, precision: str, attention: str) -> None:
    assert gang(2).run(load, strategy, precision, None, attention) == [None, None]


def test_a_silent_exchange_stops_it_all_the_same() -> None:
    for told in gang(2).run(load, "tensor", "int8", "tensor.all_reduce_sum"):
        assert "ranks (0, 1) with strategy tensor2 differ from one rank alone" in told


def load(strategy: str, precision: str, broken: str | None, attention: str = "auto") -> str | None:
    """Load an engine. Return the error's text, or None."""
    context = RankContext(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device="cpu")
    model = models.model.__wrapped__("flux")  # its layers are swapped for good
    silent = patch(f"engines.parallel.{broken}", lambda x, axis: x) if broken else nullcontext()
    try:
        with silent:
            load_engine("torch", model, context, strategy=strategy, precision=precision, attention=attention).close()
    except WrongAnswerError as error:
        return str(error)
    return None


EVERY = ("ulysses", "ring", "allgather_kv", "hybrid", "ulysses2xtensor2", "guidance2xring2", "pipeline2xulysses2")


def test_attention_in_float8_is_that_of_every_strategy() -> None:
    """A step differs from one rank's by float8's rounding, and from float32 by no more than one rank's."""
    branches = models.branches("flux", "uneven", num=2)
    model = models.model.__wrapped__("flux")
    exact, alone = (TorchEngine(model, attention=each).predict(branches, (0,)) for each in ("auto", "fp8"))
    error = max(map(relative_difference, alone, exact))
    assert 0.005 < error < MAX_ATTENTION_ERROR
    for answers in gang(4).run(predict_all, EVERY):
        for strategy, (together, in_turns) in answers.items():
            assert 0.005 < max(map(relative_difference, together, exact)) < MAX_ATTENTION_ERROR, strategy
            assert max(map(relative_difference, together, alone)) < MAX_ATTENTION_ERROR, strategy
            plain, named, plain_again = in_turns
            assert max(map(relative_difference, plain, exact)) < 1e-4, strategy
            assert all(map(torch.equal, named, together)), strategy
            assert all(map(torch.equal, plain_again, plain)), strategy


Answers = tuple[Tensor, ...]


def predict_all(strategies: tuple[str, ...]) -> dict[str, tuple[Answers, list[Answers]]]:
    """Return answers of a float8 engine, and of one whose branches ask for float8, or not, in turns."""
    model, branches = models.model.__wrapped__("flux"), models.branches("flux", "uneven", num=2)
    answers: dict[str, tuple[Answers, list[Answers]]] = {}
    for strategy in strategies:
        engine = TorchEngine(model, strategy=strategy, attention="fp8")
        together = engine.predict(branches, (0, 1, 2, 3))
        engine.close()
        engine = TorchEngine(model, strategy=strategy)
        in_turns = [engine.predict(with_attention(branches, one), (0, 1, 2, 3)) for one in ("", "fp8", "")]
        engine.close()
        answers[strategy] = together, in_turns
    return answers


def test_row_split_layers_are_quantised_too_and_find_their_scales(tmp_path: Path) -> None:
    model, path = models.model.__wrapped__("flux"), tmp_path / "scales.json"
    with recording(model.modules["transformer"], model.plan) as amax:
        (expected,) = TorchEngine(model).predict(models.branches("flux", "uneven"), (0,))
    save_calibration({"transformer": amax}, path)
    for answer, num_swapped in gang(2).run(predict_split, path):
        assert num_swapped == NUM_LINEARS
        assert 1e-4 < relative_difference(answer, expected) < 0.15


def predict_split(calibration: Path) -> tuple[Tensor, int]:
    options, model = TorchOptions(calibration=calibration), models.model.__wrapped__("flux")
    engine = TorchEngine(model, strategy="tensor", precision="fp8-static", options=options)
    branches = models.branches("flux", "uneven")
    engine.predict(branches, (dist.get_rank(),))
    (answer,) = engine.predict(branches, (0, 1))
    layers = engine._sharded.module("transformer", engine.division.team((0, 1))).modules()
    return answer, sum(isinstance(layer, QuantLinear) for layer in layers)


def test_a_rank_runs_the_blocks_that_it_read(tmp_path: Path) -> None:
    """Quantised blocks have few parameters left, and the two kinds of block not in the same proportion."""
    whole = deep()
    whole.modules["transformer"].save_pretrained(tmp_path)  # type: ignore[operator]
    branches = models.branches("flux", "uneven")
    (expected,) = TorchEngine(whole, precision="int8").predict(branches, (0,))
    for answer in gang(2).run(predict_staged, tmp_path):
        assert relative_difference(answer, expected) < 1e-5


def predict_staged(folder: Path) -> Tensor:
    with torch.device("meta"):
        outline = deep()
    model = replace(outline, weights=WeightFiles(folders={"transformer": folder}, device=torch.device("cpu")))
    engine = TorchEngine(model, strategy="pipeline", precision="int8")
    return engine.predict(models.branches("flux", "uneven"), (0, 1))[0]


def deep() -> DenoiserModel:
    """Return a model with two blocks of one kind and six of the other."""
    from diffusers import FluxTransformer2DModel

    from tests.support.flux_denoiser import as_denoiser

    config: Any = dict(models.transformer("flux").config) | {"num_single_layers": 6}
    module = FluxTransformer2DModel.from_config(config)
    return as_denoiser(module if module.device.type == "meta" else models.shake(module))
