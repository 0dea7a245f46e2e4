"""Wan 2.2 TI2V 5B, with a timestep a token, runs on gangs of Gloo ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine, load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE, denoised, encoded, without_exchange
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.references import own_clips, video
from tests.pipelines.support.references.pairs import Pair
from tests.pipelines.support.sample_requests import clip

STRATEGIES = {2: (*CONTEXT, "tensor", "guidance"), 4: (*CONTEXT, "guidance2xulysses2", "tensor2xulysses2")}
UNEVEN = {"width": 80, "height": 48}
"""A size with 45 tokens in three latent frames."""
REQUESTS = {
    "even": clip(true_cfg_scale=4.0, negative_prompt="green", num_inference_steps=2),
    "uneven": clip(true_cfg_scale=4.0, negative_prompt="green", num_inference_steps=2, num_frames=9, **UNEVEN),
}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny.wan_per_token)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(folder)


QUICK = {
    ("even", "ring"),
    ("even", "tensor"),
    ("uneven", "ulysses"),
    ("uneven", "allgather_kv"),
    ("uneven", "guidance"),
}
"""Each strategy for two ranks, once."""
CASES = [
    pytest.param(
        name, num_ranks, strategy, marks=[] if num_ranks == 2 and (name, strategy) in QUICK else [pytest.mark.slow]
    )
    for name in REQUESTS
    for num_ranks, several in STRATEGIES.items()
    for strategy in several
]


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), CASES)
def test_latents_equal_diffusers(name: str, num_ranks: int, strategy: str, folder: Path, pair: Pair) -> None:
    _, expected = pair.latents(REQUESTS[name])
    assert expected.std() > 0.1
    conditioning = encoded(folder, REQUESTS[name])
    for latents in gang(num_ranks).run(denoised, folder, REQUESTS[name], strategy, conditioning):
        assert relative_difference(latents, expected) <= TOLERANCE


def test_without_the_exchange_they_do_not(folder: Path, pair: Pair) -> None:
    _, expected = pair.latents(REQUESTS["uneven"])
    conditioning = encoded(folder, REQUESTS["uneven"])
    for latents in gang(2).run(without_exchange, folder, REQUESTS["uneven"], "ulysses", conditioning):
        assert relative_difference(latents, expected) > 10 * TOLERANCE


FROM_PICTURE = video.Clip(
    make=tiny.wan_per_token,
    reference=own_clips.wan_pipeline,
    num_latent_frames=3,
    num_pictures=1,
    changes={"num_inference_steps": 3},
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_first_picture_is_what_diffusers_makes_of_it(num_ranks: int, folder: Path) -> None:
    request = FROM_PICTURE.request(folder)
    images = FROM_PICTURE.images(request)
    expected = FROM_PICTURE.own(folder)["latents"]
    assert expected.std() > 0.1
    conditioning = video.encoded(folder, request, video.pictures_of(images))
    for made in gang(num_ranks).run(video.denoised_from, folder, request, conditioning, "ulysses"):
        torch.testing.assert_close(made["latents"], expected, rtol=0, atol=TOLERANCE)


def test_a_folder_for_pictures_is_read_as_one_for_both(folder: Path, tmp_path: Path) -> None:
    """It has the same weights under the name of diffusers' other pipeline, which needs a picture."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    names = {"_class_name": "WanImageToVideoPipeline", "image_encoder": [None, None], "image_processor": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index | names))
    both, pictures = (Checkpoint(path).defaults for path in (folder, tmp_path))
    assert [(one.min_pictures, one.max_pictures) for one in (both, pictures)] == [(0, 1), (1, 1)]
    request = FROM_PICTURE.request(folder)
    images = video.pictures_of(FROM_PICTURE.images(request))
    made = load_pipeline(Checkpoint(tmp_path)).denoise(request, images)["latents"]
    assert relative_difference(made, FROM_PICTURE.own(folder)["latents"]) <= TOLERANCE


def timed(checkpoint: Checkpoint, model: DenoiserModel, *, is_turned: bool = False) -> Branch:
    """Return a forward of tokens with two times, in any order, as with known frames; or in reverse order.

    Without a picture all tokens share one time.
    """
    branch, *_ = checkpoint.first_step(REQUESTS["uneven"])
    assert branch.inputs["timestep"].shape == (1, 1)
    (num_tokens,) = model.stream_lengths(branch.arguments).values()
    generator = torch.Generator().manual_seed(3)
    times_BL = torch.where(torch.rand(1, num_tokens, generator=generator) < 0.5, 0.0, 700.0)
    noise = torch.randn(branch.inputs["hidden_states"].shape, generator=generator)
    words = torch.randn(branch.inputs["encoder_hidden_states"].shape, generator=generator)
    times_BL = times_BL.flip(1) if is_turned else times_BL
    drawn = {"timestep": times_BL, "hidden_states": noise, "encoder_hidden_states": words}
    return replace(branch, inputs={**branch.inputs, **drawn})


def predicted(folder: Path, strategy: str, is_turned: bool) -> Tensor:
    checkpoint = Checkpoint(folder)
    model = checkpoint.denoiser()
    engine = TorchEngine(model, strategy=strategy)
    ranks = tuple(range(dist.get_world_size()))
    (prediction,) = engine.predict((timed(checkpoint, model, is_turned=is_turned),), ranks)
    engine.close()
    return prediction


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_token_keeps_its_own_time(num_ranks: int, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    model = checkpoint.denoiser()
    (expected,) = PlainEngine(model=model).predict((timed(checkpoint, model),))
    for strategy in (*CONTEXT, "tensor"):
        for prediction in gang(num_ranks).run(predicted, folder, strategy, False):
            assert relative_difference(prediction, expected) <= TOLERANCE, strategy
    for prediction in gang(num_ranks).run(predicted, folder, "ulysses", True):
        assert relative_difference(prediction, expected) > 10 * TOLERANCE
