"""Qwen-Image 2.1 on one rank, and on several that divide its heads, against the pipeline's own call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel.self_check import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.decoder import on_white
from pipelines.checkpoint import Checkpoint
from pipelines.models.pictures.qwen21 import SHARD_PLAN
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.picture_cases import PictureCase, images_of, pictures_of, request_of
from tests.pipelines.support.tiny_qwen import Qwen3Processor, qwen21

TOLERANCE = 1e-4
LOAD_PROCESSOR = "transformers.Qwen3VLProcessor.from_pretrained"
SIZES = "diffusers.modular_pipelines.qwenimage21.encoders.calculate_dimensions"
TWO = ((40, 48), (70, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen21(tmp_path_factory.mktemp("qwen21"))


def case_of(scale: float, pictures: tuple[tuple[int, int], ...] = ()) -> PictureCase:
    return PictureCase(make=qwen21, pictures=pictures, changes={"true_cfg_scale": scale})


@contextmanager
def small_pictures() -> Iterator[None]:
    """The blocks bring every picture to a megapixel, which takes a CPU long."""
    with (
        patch(LOAD_PROCESSOR, lambda *_, **__: Qwen3Processor()),
        patch(SIZES, lambda area, ratio: (64, 32, None) if ratio > 1 else (32, 64, None)),
    ):
        yield


def denoised(folder: Path, case: PictureCase, strategy: str) -> Tensor:
    checkpoint = Checkpoint(folder)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    request = request_of(case, folder)
    with small_pictures():
        pipeline = load_pipeline(checkpoint, engine)
        conditioning = pipeline.text_encoder.encode(request, pictures_of(case))
    sampler = pipeline.sampler
    state = sampler.begin(request, conditioning)
    for _ in range(sampler.num_steps(state)):
        state = pickle.loads(pickle.dumps(state))
        state = sampler.advance(state, engine.predict(sampler.branches(state), tuple(range(dist.get_world_size()))))
    engine.close()
    latents: Tensor = sampler.latents(state)["latents"]
    return latents


def own_latents(folder: Path, case: PictureCase) -> Tensor:
    with small_pictures():
        latents: Tensor = own_state(folder, request_of(case, folder), image=images_of(case) or None).get("latents")
    assert latents.std() > 0.1
    return latents


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "ulysses"), (2, "tensor"), (4, "tensor")])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_latents_equal_the_pipelines_own(folder: Path, num_ranks: int, strategy: str, scale: float) -> None:
    case = case_of(scale)
    expected = own_latents(folder, case)
    for latents in gang(num_ranks).run(denoised, folder, case, strategy):
        assert relative_difference(latents, expected) <= TOLERANCE


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "ulysses"), (2, "tensor")])
@pytest.mark.parametrize(("scale", "pictures"), [(1.0, TWO), pytest.param(3.0, TWO[:1], marks=pytest.mark.slow)])
def test_latents_with_pictures_to_look_at(
    folder: Path, num_ranks: int, strategy: str, scale: float, pictures: tuple[tuple[int, int], ...]
) -> None:
    case = case_of(scale, pictures)
    expected = own_latents(folder, case)
    assert relative_difference(own_latents(folder, case_of(scale)), expected) > 10 * TOLERANCE, "they are seen"
    for latents in gang(num_ranks).run(denoised, folder, case, strategy):
        assert relative_difference(latents, expected) <= TOLERANCE


def test_the_picture_has_the_size_asked_for(folder: Path) -> None:
    with patch(LOAD_PROCESSOR, lambda *_, **__: Qwen3Processor()):
        pipeline = load_pipeline(Checkpoint(folder))
    asked = request_of(case_of(1.0), folder)
    states = list(pipeline.states(asked))
    for latents in (pipeline.sampler.preview(states[1]), pipeline.sampler.latents(states[-1])):
        frames = pipeline.decoder.decode(latents, asked)
        assert (frames.shape, frames.dtype) == ((1, asked.height, asked.width, 3), np.uint8)


def test_what_covers_nothing_is_white() -> None:
    pixels = torch.tensor([[0.5, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 1.0], [0.5, 0.0, 1.0, 0.5]])
    expected = torch.tensor([[1.0, 1.0, 1.0], [0.5, 0.0, 1.0], [0.75, 0.5, 1.0]])
    torch.testing.assert_close(on_white(pixels), expected)


def test_the_published_configuration_is_covered() -> None:
    """Diffusers' own plan for tensor parallelism, on the class's defaults, which are the published model's."""
    from diffusers import QwenImage21Transformer2DModel

    with torch.device("meta"):
        module = QwenImage21Transformer2DModel()
    names = [name for name, _ in module.named_modules()]
    for rule in SHARD_PLAN.linears:
        assert sum(map(rule.matches, names)) == len(module.transformer_blocks)
    theirs: Callable[[str], str] = {"colwise": "ColumnLinear", "rowwise": "RowLinear"}.__getitem__
    ours = {rule.pattern: type(rule).__name__ for rule in SHARD_PLAN.linears}
    assert ours == {pattern: theirs(kind) for pattern, kind in module._tp_plan.items()}
