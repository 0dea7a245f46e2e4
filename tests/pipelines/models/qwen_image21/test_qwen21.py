"""Qwen-Image 2.1 on gangs of Gloo ranks equals the pipeline's own call, which caches the prompt's keys as well."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.core.model import DenoiserModel
from engines.core.shard_plan import named_like
from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.parallel.division import may_pair
from engines.planner.profile import profile
from engines.tensorrt_engine.export.exported import export
from engines.tensorrt_engine.export.trace import offline_team
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.decoder import on_white
from pipelines.checkpoint import Checkpoint
from pipelines.models.qwen_image21.attention import KEYS_VALUES, hoisted
from pipelines.models.qwen_image21.spec import SHARD_PLAN
from pipelines.run import Pipeline, load_pipeline
from pipelines.solver import AS_THE_MODEL, Solver
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT
from tests.pipelines.support.checkpoints.tiny_qwen import TURBO_SIGMAS, Qwen3Processor, qwen21, qwen21_turbo
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.picture_cases import PictureCase, images_of, pictures_of, request_of
from tests.pipelines.support.references.video import denoised_from

TOLERANCE = 1e-4
LOAD_PROCESSOR = "transformers.Qwen3VLProcessor.from_pretrained"
SIZES = "diffusers.modular_pipelines.qwenimage21.encoders.calculate_dimensions"
TWO = ((40, 48), (70, 40))
STRATEGIES = {
    1: ("ulysses",),
    2: (*CONTEXT, "tensor", "guidance"),
    4: (*CONTEXT, "hybrid", "tensor", "tensor2xulysses2", "guidance"),
}
BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "ulysses": ("ulysses", lambda kernel, axis, **_: kernel),
    "ring": ("start_rotation", lambda x, axis: x.clone()),
}
"""The function that does not exchange, by strategy."""


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(qwen21)


def case_of(scale: float, pictures: tuple[tuple[int, int], ...] = (), solver: Solver = AS_THE_MODEL) -> PictureCase:
    return PictureCase(make=qwen21, pictures=pictures, changes={"true_cfg_scale": scale, "solver": solver})


@contextmanager
def small_pictures() -> Iterator[None]:
    """Shrink pictures: the blocks bring each to a megapixel, which takes long on a CPU."""
    with (
        patch(LOAD_PROCESSOR, lambda *_, **__: Qwen3Processor()),
        patch(SIZES, lambda area, ratio: (64, 32, None) if ratio > 1 else (32, 64, None)),
    ):
        yield


def denoised(folder: Path, case: PictureCase, strategy: str) -> Tensor:
    request = request_of(case, folder)
    with small_pictures():
        conditioning = Checkpoint(folder).text_encoder().encode(request, pictures_of(case))
    latents: Tensor = denoised_from(folder, request, pickle.dumps(conditioning), strategy)["latents"]
    return latents


def without_exchange(folder: Path, case: PictureCase, strategy: str) -> Tensor:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, *BROKEN[strategy]):
        return denoised(folder, case, strategy)


def worst_difference(folder: Path, case: PictureCase, num_ranks: int) -> float:
    """Return the worst difference of all ranks and strategies from the pipeline's own call."""
    expected = own_latents(folder, case)
    several = [gang(num_ranks).run(denoised, folder, case, strategy) for strategy in STRATEGIES[num_ranks]]
    return max(relative_difference(latents, expected) for each in several for latents in each)


def own_latents(folder: Path, case: PictureCase) -> Tensor:
    with small_pictures():
        latents: Tensor = own_state(folder, request_of(case, folder), image=images_of(case) or None).get("latents")
    assert latents.std() > 0.1
    return latents


@pytest.mark.parametrize(
    ("num_ranks", "scale", "sigmas"),
    [(1, 1.0, (1.0, 0.4)), (2, 3.0, ()), pytest.param(4, 1.0, (), marks=pytest.mark.slow)],
)
def test_latents_equal_the_pipelines_own(folder: Path, num_ranks: int, scale: float, sigmas: tuple[float, ...]) -> None:
    assert worst_difference(folder, case_of(scale, solver=Solver(sigmas=sigmas)), num_ranks) <= TOLERANCE


@pytest.mark.parametrize(
    ("num_ranks", "scale", "pictures"),
    [
        (1, 1.0, TWO),
        pytest.param(4, 1.0, TWO, marks=pytest.mark.slow),
        pytest.param(2, 1.0, TWO, marks=pytest.mark.slow),
        pytest.param(2, 3.0, TWO[:1], marks=pytest.mark.slow),
        pytest.param(4, 3.0, TWO[:1], marks=pytest.mark.slow),
    ],
)
def test_latents_with_pictures_to_look_at(
    folder: Path, num_ranks: int, scale: float, pictures: tuple[tuple[int, int], ...]
) -> None:
    case = case_of(scale, pictures)
    unseen, expected = own_latents(folder, case_of(scale)), own_latents(folder, case)
    assert relative_difference(unseen, expected) > 10 * TOLERANCE, "they are seen"
    assert worst_difference(folder, case, num_ranks) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["ulysses", pytest.param("ring", marks=pytest.mark.slow)])
def test_without_the_exchange_they_do_not(folder: Path, strategy: str) -> None:
    case = case_of(1.0, TWO)
    for latents in gang(2).run(without_exchange, folder, case, strategy):
        assert relative_difference(latents, own_latents(folder, case)) > 10 * TOLERANCE


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_words_that_have_the_pictures_time_are_made_at_every_step(tmp_path: Path, num_ranks: int) -> None:
    folder = qwen21(tmp_path, causal_condition=False)
    assert worst_difference(folder, case_of(1.0, TWO), num_ranks) <= TOLERANCE


def loaded(folder: Path, model: DenoiserModel) -> Pipeline:
    with small_pictures():
        return load_pipeline(Checkpoint(folder), TorchEngine(model))


@pytest.mark.parametrize("num_steps", [3, 5])
def test_what_is_seen_is_made_once_a_job(folder: Path, num_steps: int) -> None:
    """It is made for the prompt and for the negative prompt."""
    model, num_tokens = Checkpoint(folder).denoiser(), []
    text: Any = model.modules["transformer"].get_submodule("txt_in")
    text.register_forward_hook(lambda _module, args, _output: num_tokens.append(args[0].shape[1]))
    request = request_of(case_of(3.0), folder)
    loaded(folder, model).denoise(replace(request, num_inference_steps=num_steps))
    assert len(num_tokens) == 2


def test_both_branches_may_run_at_once(folder: Path) -> None:
    """One prompt is longer than the other."""
    pipeline = loaded(folder, Checkpoint(folder).denoiser())
    request = replace(request_of(case_of(3.0), folder), negative_prompt="blue, and nothing else")
    one, other = pipeline.sampler.branches(pipeline.sampler.begin(request, pipeline.text_encoder.encode(request)))
    assert one.inputs["encoder_hidden_states"].shape != other.inputs["encoder_hidden_states"].shape
    assert may_pair(one, other, SHARD_PLAN)


def test_words_that_see_what_comes_after_them_paint_something_else(folder: Path) -> None:
    pipeline, request = loaded(folder, Checkpoint(folder).denoiser()), request_of(case_of(1.0), folder)
    with patch("pipelines.models.qwen_image21.attention.Prefix", lambda **_: None):
        latents = pipeline.denoise(request)["latents"]
    assert relative_difference(latents, own_latents(folder, case_of(1.0))) > 10 * TOLERANCE


def test_a_step_is_counted_without_what_is_made_once_a_job(folder: Path) -> None:
    """Its memory is counted."""
    model = Checkpoint(folder).denoiser()
    counted = profile(model)
    assert counted.num_attentions == 3
    assert counted.streams.keys() == {"painted"}
    branch, module = model.probe()[0], model.modules["transformer"]
    made = hoisted(module, branch.arguments)[KEYS_VALUES].numel()
    assert made == counted.hoisted_features["seen"] * model.stream_lengths(branch.arguments)["seen"]


def test_a_tensorrt_engine_is_refused(folder: Path) -> None:
    model = Checkpoint(folder).denoiser()
    with offline_team(ParallelSpec(ulysses=2)) as team, pytest.raises(ValueError, match="use engine: torch"):
        export(model, model.probe()[0], team)


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "ulysses"), (2, "tensor")])
def test_the_distilled_form(tmp_path: Path, num_ranks: int, strategy: str) -> None:
    folder = qwen21_turbo(tmp_path)
    case = PictureCase(make=qwen21_turbo, pictures=(), num_steps=len(TURBO_SIGMAS))
    expected = own_latents(folder, case)
    for latents in gang(num_ranks).run(denoised, folder, case, strategy):
        assert relative_difference(latents, expected) <= TOLERANCE


def test_the_picture_has_the_size_asked_for(folder: Path) -> None:
    with patch(LOAD_PROCESSOR, lambda *_, **__: Qwen3Processor()):
        pipeline = load_pipeline(Checkpoint(folder))
    asked = request_of(case_of(1.0), folder)
    states = list(pipeline.states(asked))
    for latents in (pipeline.sampler.preview(states[1]), pipeline.sampler.latents(states[-1])):
        frames = pipeline.decoder.decode(latents, asked)
        assert (frames.shape, frames.dtype) == ((1, asked.height, asked.width, 3), np.dtype(np.uint8))


def test_prompts_are_cut_before_places_run_out(folder: Path) -> None:
    """The transformer has 8192 places, and input pictures need some too."""
    checkpoint = Checkpoint(folder)
    with small_pictures():
        encoder = checkpoint.text_encoder()
    encoder.max_tokens = 8
    requests = (replace(request_of(case_of(2.0), folder), prompt=words) for words in ("a red circle", "a red ci"))
    long, short = (encoder.encode(request) for request in requests)
    assert torch.equal(long.values["prompt_embeds"], short.values["prompt_embeds"])
    assert 0 < checkpoint.defaults.max_tokens <= 4096


def test_what_covers_nothing_is_white() -> None:
    pixels = torch.tensor([[0.5, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 1.0], [0.5, 0.0, 1.0, 0.5]])
    expected = torch.tensor([[1.0, 1.0, 1.0], [0.5, 0.0, 1.0], [0.75, 0.5, 1.0]])
    torch.testing.assert_close(on_white(pixels), expected)


def test_the_published_configuration_is_covered() -> None:
    """The plan is diffusers' own for tensor parallelism, and the class's defaults are the published model."""
    from diffusers import QwenImage21Transformer2DModel

    with torch.device("meta"):
        module = QwenImage21Transformer2DModel()
    names = [name for name, _ in module.named_modules()]
    for rule in SHARD_PLAN.linears:
        assert sum(map(rule.matches, names)) == len(module.transformer_blocks)
    theirs: Callable[[str], str] = {"colwise": "ColumnLinear", "rowwise": "RowLinear"}.__getitem__
    ours = {rule.pattern: type(rule).__name__ for rule in SHARD_PLAN.linears}
    assert ours == {pattern: theirs(kind) for pattern, kind in module._tp_plan.items()}
    divided = [shard.module for shard in SHARD_PLAN.shards] + [gather.module for gather in SHARD_PLAN.gathers]
    for name in divided:
        assert named_like(module, name)
