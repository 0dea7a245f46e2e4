"""Each model on gangs of Gloo ranks, with every strategy of its plan, equals the pipeline's own call.

The quick tests have each model with its division of weights and one strategy for the context, in turn. So each strategy
meets streams of all kinds. All pairs are in the slow tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.size import Size
from pipelines.solver import Solver
from tests.engines.support.gloo import gang
from tests.pipelines.blocks import test_solver as solver
from tests.pipelines.support.checkpoints import tiny_models, tiny_others
from tests.pipelines.support.references.own_call import own_latents

TOLERANCE = 1e-4
"""Relative, in float32: sums are added in another order."""
CONTEXT = ("ulysses", "ring", "allgather_kv")


def in_turn(number: int, num_ranks: int, strategy: str) -> bool:
    """Return whether the quick tests have the model of this number with ``strategy``."""
    return num_ranks == 1 or strategy not in CONTEXT or strategy == CONTEXT[number % len(CONTEXT)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """``sides`` are height and width in the model's multiples: token counts that 4 ranks must pad.

    ``tensor``: the plan splits weights, over at most ``max_tensor`` ranks.
    """

    make: Callable[[Path], Path]
    sides: tuple[int, int] = (3, 5)
    num_frames: int | None = None
    tensor: bool = False
    max_tensor: int = 4
    changes: Mapping[str, Any] = field(default_factory=dict)

    def strategies(self, num_ranks: int) -> tuple[str, ...]:
        """Return all strategies of the plan; with more than ``max_tensor`` ranks the tokens are split as well."""
        if num_ranks == 1:
            return ("ulysses",)
        tensor = "tensor" if num_ranks <= self.max_tensor else f"tensor{self.max_tensor}xulysses"
        return (*CONTEXT, *([tensor] if self.tensor else []))


NEGATIVE: Mapping[str, Any] = {"negative_prompt": "blue"}
"""Changes for models whose blocks, called as a whole, do not guide without it; their pipelines do."""

CASES = {
    "flux2 klein": Case(make=tiny_models.flux2_klein, tensor=True),
    "qwen": Case(make=tiny_models.qwen_image, tensor=True, changes={"negative_prompt": " "}),
    "qwen without guidance, with sigmas": Case(
        make=tiny_models.qwen_image, changes={"true_cfg_scale": 1.0, "solver": Solver(sigmas=(1.0, 0.4))}
    ),
    "z image": Case(make=tiny_models.z_image, tensor=True, max_tensor=2),
    "z image with guidance": Case(make=tiny_models.z_image, tensor=True, max_tensor=2, changes={"true_cfg_scale": 3.0}),
    "krea 2": Case(make=tiny_others.krea2),
    "ernie": Case(make=tiny_others.ernie_image),
    "sd 3": Case(make=tiny_others.sd3, tensor=True, changes=NEGATIVE),
    "sd 3.5 large": Case(make=tiny_others.sd35_large, tensor=True, changes=NEGATIVE),
}


@pytest.fixture(scope="module")
def own(folders: Callable[[Any], Path]) -> Callable[[str], Tensor]:
    """Return the latents of the pipeline's own call."""
    return cache(
        lambda name: own_latents(folders(CASES[name].make), request_of(CASES[name], folders(CASES[name].make)))
    )


def request_of(case: Case, folder: Path) -> MediaRequest:
    defaults = Checkpoint(folder).defaults
    height, width = (side * defaults.size_multiple for side in case.sides)
    size = Size(width=width, height=height, num_frames=case.num_frames)
    return defaults.request(size, prompt="a red circle", num_inference_steps=2, seed=5, **case.changes)


@cache
def encoded(folder: Path, request: MediaRequest) -> bytes:
    """Return the pickled conditioning as all ranks get it: strategies differ only after it."""
    return pickle.dumps(Checkpoint(folder).text_encoder().encode(request))


def denoised(folder: Path, request: MediaRequest, strategy: str, conditioning: bytes) -> Tensor:
    checkpoint = Checkpoint(folder)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    sampler = checkpoint.sampler()
    state = sampler.begin(request, pickle.loads(conditioning))
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, engine.predict(sampler.branches(state), tuple(range(dist.get_world_size()))))
    engine.close()
    latents: Tensor = sampler.latents(state)["latents"]
    return latents


def without_exchange(folder: Path, request: MediaRequest, strategy: str, conditioning: bytes) -> Tensor:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised(folder, request, strategy, conditioning)


TWO = ("z image with guidance",)
"""Quick tests run these on two ranks, where weights are split otherwise; all others run on one and four."""
SIZES = [
    pytest.param(
        name,
        num_ranks,
        strategy,
        marks=[] if (num_ranks != 2 or name in TWO) and in_turn(number, num_ranks, strategy) else [pytest.mark.slow],
    )
    for number, (name, case) in enumerate(CASES.items())
    for num_ranks in (1, 2, 4)
    for strategy in case.strategies(num_ranks)
]


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), SIZES)
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path], own: Callable[[str], Tensor]
) -> None:
    folder, expected = folders(CASES[name].make), own(name)
    request = request_of(CASES[name], folder)
    assert expected.std() > 0.1
    for latents in gang(num_ranks).run(denoised, folder, request, strategy, encoded(folder, request)):
        assert relative_difference(latents, expected) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_without_the_exchange_they_do_not(
    name: str, folders: Callable[[Any], Path], own: Callable[[str], Tensor]
) -> None:
    folder = folders(CASES[name].make)
    request = request_of(CASES[name], folder)
    for latents in gang(2).run(without_exchange, folder, request, "ulysses", encoded(folder, request)):
        assert relative_difference(latents, own(name)) > 10 * TOLERANCE


SOLVERS = ("wan, dpm++", "wan, shift")
"""A second-order solver, with earlier predictions beside the latents, and the shift of a clip's schedule."""


@pytest.fixture(scope="module")
def own_solved(folders: Callable[[Any], Path]) -> Callable[[str], Tensor]:
    """Return the latents of diffusers with the user's scheduler."""

    def of(name: str) -> Tensor:
        case, checkpoint = solver.CASES[name], Checkpoint(folders(solver.CASES[name].make))
        request, max_tokens = solver.request_of(case, checkpoint), checkpoint.text_encoder().max_tokens
        latents: Tensor = solver.theirs(case, checkpoint.path, request, max_tokens)
        return latents

    return cache(of)


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"),
    [(name, num_ranks, CONTEXT[place]) for name in SOLVERS for place, num_ranks in enumerate((1, 2, 4))],
)
def test_every_team_has_the_solver_of_a_request(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path], own_solved: Callable[[str], Tensor]
) -> None:
    folder = folders(solver.CASES[name].make)
    request = solver.request_of(solver.CASES[name], Checkpoint(folder))
    for latents in gang(num_ranks).run(denoised, folder, request, strategy, encoded(folder, request)):
        assert relative_difference(latents, own_solved(name)) <= TOLERANCE


def test_solvers_differ(own_solved: Callable[[str], Tensor]) -> None:
    second, other = map(own_solved, SOLVERS)
    assert relative_difference(second, other) > 10 * TOLERANCE
