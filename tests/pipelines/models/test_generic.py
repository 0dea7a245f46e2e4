"""Unknown classes work: the registry is emptied, so that known models stand for future ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.models import registry
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import (
    CONTEXT,
    TOLERANCE,
    Case,
    denoised,
    in_turn,
    request_of,
    without_exchange,
)
from tests.pipelines.support.checkpoints import tiny, tiny_models, tiny_others, tiny_unknown
from tests.pipelines.support.references.own_call import own_latents

DIVIDED = {
    "two streams": Case(make=tiny.flux),
    "two streams, positions in a batch": Case(make=tiny_models.flux2_klein),
    "a clip": Case(make=tiny.wan, num_frames=5),
    "a text beside": Case(make=tiny_unknown.ltx, num_frames=9),
}
WHOLE = {
    "a table for two streams": Case(make=tiny_models.qwen_image),
    "lists": Case(make=tiny_models.z_image),
    "lists and guidance": Case(make=tiny_models.z_image, changes={"true_cfg_scale": 3.0}),
}


@pytest.fixture(autouse=True)
def nothing_known() -> Any:
    with patch.dict(registry.FAMILY_FOLDERS, clear=True):
        yield


@cache
def encoded(folder: Path, request: MediaRequest) -> bytes:
    """Return the conditioning like ``test_gangs.encoded``, for an unknown class."""
    return pickle.dumps(Checkpoint(folder).text_encoder().encode(request))


def unknown_denoised(folder: Path, request: MediaRequest, strategy: str, conditioning: bytes) -> Tensor:
    with patch.dict(registry.FAMILY_FOLDERS, clear=True):
        return denoised(folder, request, strategy, conditioning)


def unknown_without_exchange(folder: Path, request: MediaRequest, strategy: str, conditioning: bytes) -> Tensor:
    with patch.dict(registry.FAMILY_FOLDERS, clear=True):
        return without_exchange(folder, request, strategy, conditioning)


@pytest.mark.parametrize("name", [*DIVIDED, *WHOLE])
def test_one_rank_gives_the_pipelines_own_latents(name: str, folders: Callable[[Any], Path]) -> None:
    case = {**DIVIDED, **WHOLE}[name]
    folder = folders(case.make)
    request = request_of(case, folder)
    (latents,) = gang(1).run(unknown_denoised, folder, request, "ulysses", encoded(folder, request))
    assert relative_difference(latents, own_latents(folder, request)) <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "num_steps"),
    [(tiny_unknown.sdxl, 2), pytest.param(tiny_others.ideogram4, 48, marks=pytest.mark.slow)],
)
def test_a_u_net_and_two_transformers_a_step(
    make: Callable[[Path], Path], num_steps: int, folders: Callable[[Any], Path]
) -> None:
    """Ideogram 4's guidance is a list of 48 scales: its blocks need another list for other numbers of steps."""
    folder = folders(make)
    request = replace(request_of(Case(make=make), folder), num_inference_steps=num_steps)
    pipeline = load_pipeline(Checkpoint(folder))
    latents = pipeline.denoise(request)
    assert relative_difference(latents["latents"], own_latents(folder, request)) <= TOLERANCE
    assert pipeline.decoder.decode(latents, request).shape == (1, request.height, request.width, 3)


PLANS = [
    pytest.param(
        name,
        num_ranks,
        strategy,
        marks=[] if num_ranks == 4 and in_turn(number, num_ranks, strategy) else [pytest.mark.slow],
    )
    for number, name in enumerate(DIVIDED)
    for num_ranks in (2, 4)
    for strategy in CONTEXT
]


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), PLANS)
def test_a_plan_of_diffusers_divides_a_step(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path]
) -> None:
    case = DIVIDED[name]
    folder = folders(case.make)
    request = request_of(case, folder)
    for latents in gang(num_ranks).run(unknown_denoised, folder, request, strategy, encoded(folder, request)):
        assert relative_difference(latents, own_latents(folder, request)) <= TOLERANCE


@pytest.mark.parametrize("name", DIVIDED)
def test_without_the_exchange_it_does_not(name: str, folders: Callable[[Any], Path]) -> None:
    case = DIVIDED[name]
    folder = folders(case.make)
    request = request_of(case, folder)
    for latents in gang(2).run(unknown_without_exchange, folder, request, "ulysses", encoded(folder, request)):
        assert relative_difference(latents, own_latents(folder, request)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", WHOLE)
def test_several_ranks_without_a_plan_are_an_error(name: str, folders: Callable[[Any], Path]) -> None:
    folder = folders(WHOLE[name].make)
    request = request_of(WHOLE[name], folder)
    with pytest.raises(RuntimeError, match=r"there is no plan to divide \w+Transformer2DModel over 2 ranks.*num_ranks"):
        gang(2).run(unknown_denoised, folder, request, "ulysses", b"")


def test_auto_needs_a_step_to_choose_by(folders: Callable[[Any], Path]) -> None:
    case = DIVIDED["two streams"]
    folder = folders(case.make)
    with pytest.raises(RuntimeError, match="strategy 'auto' needs a step to choose by"):
        gang(2).run(unknown_denoised, folder, request_of(case, folder), "auto", b"")


def test_defaults_are_what_the_blocks_say(folders: Callable[[Any], Path]) -> None:
    picture, clip = (Checkpoint(folders(make)).defaults for make in (tiny_models.qwen_image, tiny.wan))
    assert (picture.kind, picture.width, picture.num_inference_steps) == ("image", 1024, 50)
    assert (picture.true_cfg_scale, picture.max_tokens, picture.takes_mask) == (4.0, 1024, True)
    assert (clip.kind, clip.width, clip.height, clip.num_frames, clip.true_cfg_scale) == ("video", 832, 480, 81, 5.0)


def test_a_gang_is_not_prepared_before_its_first_request(
    folders: Callable[[Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(folders(tiny_models.z_image))
    caplog.set_level("INFO")
    assert checkpoint.denoiser().probe() == ()
    assert checkpoint.first_steps([], ("transformer",)) == ()
    assert "no warm-up before the first request" in caplog.text
    with pytest.raises(ValueError, match="not known before there is a request"):
        checkpoint.first_step(checkpoint.defaults.request())


@pytest.mark.parametrize("make", [tiny_models.z_image, tiny.wan])
def test_pixels_come_out(make: Any, folders: Callable[[Any], Path]) -> None:
    folder = folders(make)
    case = Case(make=make, num_frames=5 if make is tiny.wan else None)
    request = request_of(case, folder)
    frames = load_pipeline(Checkpoint(folder)).run(request)
    assert frames.shape == (request.num_frames, request.height, request.width, 3)


def test_a_pipeline_without_blocks_is_an_error_that_lists_others(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "SanaTransformer2DModel"}')
    index = '{"_class_name": "NoSuchPipeline", "transformer": ["diffusers", "SanaTransformer2DModel"]}'
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ValueError, match=r"no blocks for the NoSuchPipeline.*WanModularPipeline"):
        _ = Checkpoint(tmp_path).defaults
    (tmp_path / "model_index.json").write_text('{"transformer": ["diffusers", "NoSuchTransformer"]}')
    with pytest.raises(ValueError, match="diffusers has no class"):
        Checkpoint(tmp_path)
