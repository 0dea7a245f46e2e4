"""Models that run through diffusers' blocks work as engines: each rank's answer, and the graph's content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.report import read_engine_text
from engines.tensorrt_engine.export.exported import export, rank_weights
from engines.tensorrt_engine.export.trace import offline_team
from pipelines.checkpoint import Checkpoint
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.all_ranks import Case, relative_error
from tests.pipelines.support.checkpoints import (
    tiny_cosmos,
    tiny_flux3,
    tiny_ltx,
    tiny_minimax,
    tiny_others,
    tiny_pictures,
    tiny_qwen,
    tiny_vace,
    tiny_video,
)
from tests.pipelines.support.checkpoints.first_steps import first_step

BOUND = 1e-5
MAKERS: dict[str, Callable[[Path], Path]] = {
    "cosmos": tiny_cosmos.cosmos,
    "flux2": tiny_pictures.flux2_dev,
    "flux3": tiny_flux3.flux3,
    "ltx": tiny_ltx.ltx,
    "ltx2": partial(tiny_ltx.ltx2, num_layers=2),
    "minimax": tiny_minimax.minimax_h3,
    "qwen": tiny_qwen.qwen,
    "sd3": tiny_others.sd3,
    "vace": tiny_vace.wan_vace,
    "wan from a picture": tiny_video.wan_picture,
}
TENSOR_ALONE = ("flux3",)
QUICK = {
    ("ltx", "tensor"): "it masks keys of the text, which each rank has whole; its heads have tables of their own",
    ("qwen", "ulysses"): "two streams",
    ("sd3", "ulysses"): "the picture before the text",
}
EXPORTED = [
    pytest.param(name, strategy, marks=() if (name, strategy) in QUICK else (pytest.mark.slow,))
    for name in MAKERS
    for strategy in (("tensor",) if name in TENSOR_ALONE else ("ulysses", "tensor"))
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    denoiser: DenoiserModel
    branch: Branch

    @torch.no_grad()
    def expected(self) -> Tensor:
        return self.denoiser.forward(self.denoiser.modules[self.branch.module], self.branch.arguments)

    def case(self, strategy: str) -> Case:
        name = self.branch.module
        with offline_team(ParallelSpec.of(strategy, 2)) as team:
            exported = export(self.denoiser, self.branch, team)
            teams = [replace(team, tensor=replace(team.tensor, index=index)) for index in range(team.tensor.size)]
        weights = [rank_weights(self.denoiser, name, each) for each in teams]
        return Case(exported=exported, weights=tuple(weights * (2 // len(weights))))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def model(name: str) -> Model:
        folder = MAKERS[name](tmp_path_factory.mktemp("model"))
        return Model(denoiser=Checkpoint(folder).denoiser(), branch=first_step(folder)[0])

    return model


@pytest.fixture(scope="module")
def case_of(model_of: Callable[[str], Model]) -> Callable[[str, str], Case]:
    return cache(lambda name, strategy: model_of(name).case(strategy))


@pytest.mark.parametrize(("name", "strategy"), EXPORTED)
def test_every_rank_predicts_what_one_device_does(
    name: str, strategy: str, model_of: Callable[[str], Model], case_of: Callable[[str, str], Case]
) -> None:
    model = model_of(name)
    for prediction in case_of(name, strategy).predictions(model.branch.inputs):
        assert relative_error(prediction, model.expected()) <= BOUND


@pytest.mark.parametrize(("name", "strategy"), EXPORTED)
def test_control_a_broken_exchange_is_seen(
    name: str, strategy: str, model_of: Callable[[str], Model], case_of: Callable[[str, str], Case]
) -> None:
    model, case = model_of(name), case_of(name, strategy)
    num_exchanges = sum(case.exported.graph.collectives().values()) - 1  # the last one gathers the prediction
    broken = case.predictions(model.branch.inputs, skip_collectives=range(num_exchanges))[-1]
    assert not relative_error(broken, model.expected()) <= 1000 * BOUND


@pytest.mark.parametrize(("name", "strategy"), EXPORTED)
def test_the_builder_takes_the_graph(
    name: str, strategy: str, case_of: Callable[[str, str], Case], build_file: Build
) -> None:
    graph = case_of(name, strategy).exported.graph
    text = read_engine_text(build_file(graph.serialized()))
    assert text is not None
    assert text.collectives == graph.collectives()
