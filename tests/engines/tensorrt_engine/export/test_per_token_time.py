"""Models with a timestep a token, and models of two transformers, as engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.report import build_engine
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.export.buckets import varying_dims
from engines.tensorrt_engine.rules import TensorRTOptions
from tests.engines.tensorrt_engine.support.all_ranks import export_case, relative_error
from tests.engines.tensorrt_engine.support.cases import TOLERANCE
from tests.engines.tensorrt_engine.support.zoo import reference, shaken, wan_inputs, wan_model
from tests.support import wan_denoiser as wan

SPARE_MISS = 20


def model() -> DenoiserModel:
    return wan.as_denoiser(wan_model().modules, expand_timesteps=True)


def inputs(batch: int, frames: int, height: int, width: int) -> dict[str, Tensor]:
    """Return inputs with some clean tokens, as with a given first frame: their timestep is 0."""
    num_tokens = frames * (height // 2) * (width // 2)
    is_clean = torch.rand(batch, num_tokens, generator=torch.Generator().manual_seed(4)) < 0.3
    return wan_inputs(batch, frames, height, width) | {"timestep": torch.where(is_clean, 0.0, 700.0)}


@pytest.mark.parametrize("strategy", ["ulysses", pytest.param("tensor", marks=pytest.mark.slow)])
def test_every_rank_predicts_what_one_device_does(strategy: str) -> None:
    asked = inputs(1, 3, 6, 10)
    expected = reference(model(), asked)
    case = export_case(model(), asked, ParallelSpec.of(strategy, 2))
    for prediction in case.predictions(asked):
        assert relative_error(prediction, expected) <= TOLERANCE["fp32"]
    uniform = case.predictions(asked | {"timestep": torch.full_like(asked["timestep"], 700.0)})[0]
    assert relative_error(uniform, expected) > SPARE_MISS * TOLERANCE["fp32"], "each token has its own timestep"


@pytest.mark.slow
@pytest.mark.parametrize("has_picture", [True, False])
def test_one_engine_for_two_sizes(has_picture: bool) -> None:
    """Without a picture, all tokens have one timestep."""
    one = {} if has_picture else {"timestep": torch.full((1, 1), 700.0)}
    buckets = (inputs(1, 3, 8, 16) | one, inputs(1, 5, 4, 8) | one)
    case = export_case(model(), buckets[0], ParallelSpec.of("ulysses", 2), dynamic=varying_dims(buckets))
    for asked in buckets:
        for prediction in case.predictions(asked):
            assert relative_error(prediction, reference(model(), asked)) <= TOLERANCE["fp32"]


def test_two_transformers_share_an_engine_file(tmp_path: Path) -> None:
    """Weights are inputs, so both have the same engine file."""
    first, second = wan_model().modules["transformer"], shaken(wan_model().modules["transformer"], seed=4)
    both = wan.as_denoiser({"transformer": first, "transformer_2": second})
    branch = Branch(inputs=wan_inputs(1, 3, 6, 10))
    branches = [branch, replace(branch, module="transformer_2")]
    config = TensorRTConfig(options=TensorRTOptions(cache_dir=tmp_path))
    reports = build_engine(both, branches, config=config, num_ranks=2, target=Target.parse("sm89"), visible=False)
    assert len(reports) == 1
    assert reports[0].collectives == {"all_to_all": 4, "all_gather": 1}
