"""Compare alternating jobs with and without adapters with diffusers' own pipeline and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from engines import additions
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.request import MediaRequest
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.jobs import BOTH, MODELS, NONE, ONE, TOLERANCE, TURNS, Served, Setting, painted
from tests.pipelines.lora.support.tiny_lora import request_of

SETTINGS = {
    "alone": Setting(),
    "alone, fast": Setting(fast=True),
    "ulysses": Setting(num_ranks=2),
    "ulysses, fast": Setting(num_ranks=2, fast=True),
    "tensor": Setting(num_ranks=2, strategy="tensor"),
    "tensor, sliced": Setting(num_ranks=2, strategy="tensor", sliced=True),
    "pipeline": Setting(num_ranks=2, strategy="pipeline"),
    "four, ulysses": Setting(num_ranks=4),
    "four, tensor and ulysses": Setting(num_ranks=4, strategy="tensor2xulysses"),
}
WITHOUT_PIPELINE = ("flux2 klein", "z image")
"""Models whose plan has no pipeline strategy."""
QUICK = {
    ("flux", "alone"),
    ("flux", "ulysses, fast"),
    ("flux", "tensor, sliced"),
    ("flux", "pipeline"),
    ("qwen", "alone, fast"),
    ("qwen", "ulysses"),
    ("qwen", "tensor"),
}
"""Each setting for two ranks at most once; a compiled and a hand-ordered step of two models."""
CASES = [
    pytest.param(model, setting, marks=[] if (model, setting) in QUICK else [pytest.mark.slow])
    for model in MODELS
    for setting in SETTINGS
    if not (model in WITHOUT_PIPELINE and setting == "pipeline") and not (model == "wan" and SETTINGS[setting].fast)
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_jobs_in_turns_equal_diffusers(model: str, name: str, served: Callable[[str], Served]) -> None:
    here, setting = served(model), SETTINGS[name]
    requests = [request_of(here.folder, loras) for loras in TURNS]
    for latents in gang(setting.num_ranks).run(painted, here.folder, here.named, requests, setting):
        plain, one, both, *rest = latents
        for mine, request in zip((plain, one, both), requests, strict=False):
            assert relative_difference(mine, here.expected(request)) <= TOLERANCE, request.loras
        assert relative_difference(one, plain) > 0.05, "the adapter is there"
        assert relative_difference(both, one) > 0.05
        for mine, again in zip(rest, (plain, one, plain), strict=True):
            assert mine.equal(again), "nothing of other jobs is left"


@pytest.mark.parametrize("name", ["alone", "alone, fast", "tensor", "tensor, sliced"])
def test_what_is_always_there_equals_what_a_request_names(name: str, served: Callable[[str], Served]) -> None:
    here, setting = served("qwen"), SETTINGS[name]
    ranks = gang(setting.num_ranks)
    asked, plain = [request_of(here.folder, BOTH)], [request_of(here.folder)]
    named = ranks.run(painted, here.folder, here.named, asked, setting)
    always = ranks.run(painted, here.folder, here.always, plain, setting)
    assert all(one[0].equal(other[0]) for one, other in zip(named, always, strict=True))


TEAMS = ("alone", "together", "alone", "together")
MIXES = (ONE, BOTH, NONE, ONE)


def painted_by_teams(
    folder: Path, sources: tuple[LoraSource, ...], requests: list[MediaRequest], strategy: str, teams: tuple[str, ...]
) -> list[Tensor]:
    """Return the first prediction of each of ``teams`` for each of ``requests``."""
    checkpoint = Checkpoint(folder, loras=sources)
    rank, world = dist.get_rank(), tuple(range(dist.get_world_size()))
    encoder, sampler = checkpoint.text_encoder(), checkpoint.sampler()
    conditioning = encoder.encode(requests[0])
    steps = [sampler.branches(sampler.begin(request, conditioning)) for request in requests]
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    ranks = {"alone": (rank,), "together": world}
    predictions = [engine.predict(step, ranks[team])[0] for step in steps for team in teams]
    engine.close()
    return predictions


@pytest.mark.parametrize("strategy", ["tensor", "ulysses"])
def test_teams_of_all_sizes_see_the_same_weights(strategy: str, served: Callable[[str], Served]) -> None:
    """Shares of weights partly alias each other; some are made while others have adapters applied."""
    here = served("flux")
    requests = [request_of(here.folder, loras) for loras in MIXES]
    apart: dict[str, list[list[Tensor]]] = {
        team: gang(2).run(painted_by_teams, here.folder, here.named, requests, strategy, (team,))
        for team in ("alone", "together")
    }
    mixed = gang(2).run(painted_by_teams, here.folder, here.named, requests, strategy, TEAMS)
    for rank in range(2):
        expected = [apart[team][rank][index] for index in range(len(requests)) for team in TEAMS]
        assert all(one.equal(other) for one, other in zip(mixed[rank], expected, strict=True))
        assert relative_difference(apart["alone"][rank][0], apart["together"][rank][0]) <= TOLERANCE
        assert relative_difference(apart["alone"][rank][0], apart["alone"][rank][2]) > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["blocks", "fast"])
@pytest.mark.parametrize("model", ["flux", "qwen"])
def test_captured_steps_follow_the_weights(model: str, fast: bool, served: Callable[[str], Served]) -> None:
    here = served(model)
    requests = [request_of(here.folder, loras) for loras in TURNS]
    on_cpu = painted(here.folder, here.named, requests, Setting())
    on_gpu = painted(here.folder, here.named, requests, Setting(fast=fast, device="cuda"))
    assert all(relative_difference(mine, other) < 2e-3 for mine, other in zip(on_gpu, on_cpu, strict=True))
    plain, one, _, again, one_again, last = on_gpu
    assert relative_difference(one, plain) > 0.05
    for mine, other in ((again, plain), (one_again, one), (last, plain)):
        assert relative_difference(mine, other) < 1e-5, "a step as it comes, and one that is replayed"


def without_restoring(*args: Any) -> list[Tensor]:
    """Additions of an ended job are never removed."""
    write = additions._Weight.write

    def stays(weight: Any, mix: Any, sums: Any) -> None:
        if mix:
            write(weight, mix, sums)

    with patch.object(additions._Weight, "write", stays):
        return painted(*args)


def test_without_the_kept_weights_jobs_are_not_their_own(served: Callable[[str], Served]) -> None:
    here = served("flux")
    requests = [request_of(here.folder, loras) for loras in TURNS]
    plain, *_, last = without_restoring(here.folder, here.named, requests, Setting())
    assert relative_difference(plain, here.expected(requests[0])) > 100 * TOLERANCE
    assert relative_difference(last, here.expected(requests[0])) > 100 * TOLERANCE
