"""Wan VACE on gangs of Gloo ranks equals diffusers' pipeline as users call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.parallel.division import shape_of
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints import tiny_vace
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.video import Frames, denoised_from, encoded, frames, picture, pictures_of

HEIGHT, WIDTH, NUM_FRAMES = 48, 80, 5
"""Size with 30 tokens, or 15 more for each picture: 4 ranks must pad them."""


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], Path] = tiny_vace.wan_vace
    has_clip: bool = True
    has_mask: bool = False
    num_pictures: int = 0
    control_scale: float | None = None


CASES = {
    "words": Case(has_clip=False),
    "a clip": Case(),
    "a mask, weighed": Case(has_mask=True, control_scale=0.5),
    "pictures beside a clip": Case(num_pictures=2),
    "two transformers": Case(tiny_vace.wan22_vace, has_mask=True, num_pictures=1),
}
SOME, ALL = "two transformers", (*CONTEXT, "hybrid", "guidance", "tensor")
QUICK = {
    ("words", 1, "ulysses"),
    ("a clip", 4, "ring"),
    ("a mask, weighed", 2, "ulysses"),
    ("pictures beside a clip", 4, "allgather_kv"),
    (SOME, 1, "ulysses"),
    (SOME, 2, "tensor"),
    (SOME, 4, "hybrid"),
}
GANGS = [
    pytest.param(name, num_ranks, strategy, marks=() if (name, num_ranks, strategy) in QUICK else pytest.mark.slow)
    for name in CASES
    for num_ranks in (1, 2, 4)
    for strategy in {1: ("ulysses",), 2: tuple(one for one in ALL if one != "hybrid"), 4: ALL}[num_ranks]
]


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    case = CASES[name]
    along = {"num_video_frames": NUM_FRAMES * case.has_clip, "has_mask": case.has_mask}
    words = {"prompt": "a red circle", "negative_prompt": "blue", "num_inference_steps": 3, "seed": 5}
    more = {"num_pictures": case.num_pictures, "control_scale": case.control_scale, **changes}
    size = Size(width=WIDTH, height=HEIGHT, num_frames=NUM_FRAMES)
    return Checkpoint(folder).defaults.request(size, **words, **along, **more)


def clip_of() -> Frames:
    return frames(WIDTH, HEIGHT, NUM_FRAMES)


def masks_of() -> Frames:
    masks = [Image.new("RGB", (WIDTH, HEIGHT)) for _ in range(NUM_FRAMES)]
    for number, mask in enumerate(masks):
        mask.paste("white", (8 * number, 8, 8 * number + 24, 40))
    return Frames(masks)


def reference_pictures(name: str) -> list[Image.Image]:
    """Return pictures of another shape than the clip."""
    return [picture(64, 96, seed) for seed in range(7, 7 + CASES[name].num_pictures)]


def inputs_of(name: str) -> InputPictures:
    case = CASES[name]
    return InputPictures(
        pictures=tuple(map(InputPicture.of, reference_pictures(name))),
        video=pictures_of(clip_of()).video if case.has_clip else None,
        video_mask=pictures_of(masks_of()).video if case.has_mask else None,
    )


def own(name: str, folder: Path, request: MediaRequest, **more: Any) -> Any:
    """Return diffusers' result for the same case."""
    case = CASES[name]
    call: dict[str, Any] = {"reference_images": reference_pictures(name) or None, **more}
    if case.has_mask:
        call["mask"] = list(masks_of())
    if case.control_scale is not None:
        call["conditioning_scale"] = case.control_scale
    return own_clips.vace_pipeline(folder, request, clip_of() if case.has_clip else (), **call)["latents"]


@pytest.fixture(scope="module")
def expected(folders: Callable[[Any], Path]) -> Callable[[str], Tensor]:
    """Return the latents, without those of the pictures before them."""

    def of(name: str) -> Tensor:
        folder = folders(CASES[name].make)
        latents: Tensor = own(name, folder, request_of(name, folder))
        return latents

    return cache(of)


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), GANGS)
def test_latents_equal_diffusers(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path], expected: Callable[[str], Tensor]
) -> None:
    folder = folders(CASES[name].make)
    assert expected(name).std() > 0.1
    request = request_of(name, folder)
    conditioning = encoded(folder, request, inputs_of(name))
    for values in gang(num_ranks).run(denoised_from, folder, request, conditioning, strategy):
        assert values["latents"].shape == expected(name).shape
        assert relative_difference(values["latents"], expected(name)) <= TOLERANCE


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes) -> dict[str, Any]:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised_from(folder, request, conditioning, "ulysses")


def test_without_the_exchange_they_do_not(folders: Callable[[Any], Path], expected: Callable[[str], Tensor]) -> None:
    folder = folders(CASES[SOME].make)
    request = request_of(SOME, folder)
    for values in gang(2).run(without_exchange, folder, request, encoded(folder, request, inputs_of(SOME))):
        assert relative_difference(values["latents"], expected(SOME)) > 10 * TOLERANCE


def test_what_comes_along_matters(expected: Callable[[str], Tensor]) -> None:
    plain = expected("a clip")
    for name in ("words", "a mask, weighed", "pictures beside a clip"):
        assert relative_difference(expected(name), plain) > 10 * TOLERANCE, name


@pytest.mark.parametrize("name", CASES)
def test_a_gang_prepares_with_blank_inputs(name: str, folders: Callable[[Any], Path]) -> None:
    """Blank steps have the shapes of real ones, also without a clip."""
    folder = folders(CASES[name].make)
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    sampler = checkpoint.sampler()
    real = sampler.branches(sampler.begin(request, checkpoint.text_encoder().encode(request, inputs_of(name))))
    blank = checkpoint.first_step(request)
    assert [*map(shape_of, blank)] == [*map(shape_of, real)]
    probe = checkpoint.denoiser().probe()
    assert [branch.module for branch in probe] == [*(2 * [*checkpoint.denoiser().modules])][:2]


def test_a_job_makes_the_texts_keys_once(folders: Callable[[Any], Path]) -> None:
    """Diffusers' own loop would make a new control clip in every call."""
    folder = folders(tiny_vace.wan_vace)
    checkpoint = Checkpoint(folder, dtype=torch.bfloat16)
    denoiser, calls = checkpoint.denoiser(), list[Any]()
    for block in ("vace_blocks.1", "blocks.2"):
        keys = denoiser.modules["transformer"].get_submodule(f"{block}.attn2.to_k")
        keys.register_forward_hook(lambda *_: calls.append(None))
    engine = TorchEngine(denoiser, strategy="ulysses", fast=False)
    load_pipeline(checkpoint, engine).denoise(request_of("a clip", folder), inputs_of("a clip"))
    assert len(calls) == 2 * 2, "once for each prompt"


def test_frames_equal_diffusers_and_a_preview_is_one_of_them(folders: Callable[[Any], Path]) -> None:
    name = "pictures beside a clip"
    folder = folders(CASES[name].make)
    request, pipeline = request_of(name, folder), load_pipeline(Checkpoint(folder))
    *_, before, state = pipeline.states(request, inputs_of(name))
    made = pipeline.decoder.decode(pipeline.sampler.latents(state), request)
    (own_FHWC,) = own(name, folder, request, output_type="np")
    assert np.abs(made - 255 * own_FHWC).max() < 0.51
    preview = pipeline.decoder.preview(pipeline.sampler.preview(before), request)
    assert preview.shape == (1, HEIGHT, WIDTH, 3)


def test_the_defaults_of_diffusers_pipeline(folders: Callable[[Any], Path]) -> None:
    one, two = (Checkpoint(folders(make)).defaults for make in (tiny_vace.wan_vace, tiny_vace.wan22_vace))
    assert (one.width, one.height, one.num_frames, one.num_inference_steps) == (832, 480, 81, 50)
    assert one.capabilities == two.capabilities == ("text-to-video", "image-to-video", "video-to-video")
    assert (one.keeps_length, one.masks_video, one.takes_strength, one.control_scale) == (True, True, False, 1.0)
    assert (one.solver.boundary_ratio, two.solver.boundary_ratio) == (None, 0.875)
    with pytest.raises(ValueError, match="from 0 to 4"):
        one.request(num_pictures=5)
