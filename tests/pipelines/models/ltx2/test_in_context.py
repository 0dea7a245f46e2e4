"""LTX-2 with a clip as context, on gangs of Gloo ranks, against diffusers' pipeline as a user calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2InContextPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from PIL import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, InputVideo, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.references.video import frames, picture

SIDES = (64, 96)
NUM_FRAMES = 5
"""Three frames of latents: 18 tokens, and as many of the context."""
CASES: dict[str, tuple[int, ...]] = {"a clip": (), "a picture begins": (0,), "pictures too": (4, 0)}
"""Places of pictures beside the clip, counted in frames."""
PLACES = {0: 0, 4: 2}
"""The same in frames of latents."""
STRATEGIES = {1: ("ulysses",), 2: ("ulysses", "tensor"), 4: ("ring", "hybrid")}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx2_few_layers)


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    height, width = SIDES
    along = {"num_pictures": len(CASES[name]), "frame_indices": CASES[name], "num_video_frames": NUM_FRAMES}
    words = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 1.0}
    more = {"num_inference_steps": 2, "seed": 5, **words, **along, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=NUM_FRAMES), **more)


def images_of(name: str) -> list[Image.Image]:
    height, width = SIDES
    return [picture(width, height, seed) for seed in range(5, 5 + len(CASES[name]))]


def along_with(name: str) -> InputPictures:
    height, width = SIDES
    data = b"".join(frame.tobytes() for frame in frames(width, height, NUM_FRAMES))
    clip = InputVideo(width=width, height=height, num_frames=NUM_FRAMES, fps=24, data=data)
    return InputPictures(pictures=tuple(map(InputPicture.of, images_of(name))), video=clip)


def own_latents(name: str, folder: Path) -> Tensor:
    """Latents of the classic pipeline without guidance, as tokens."""
    parts = LTX2Pipeline.from_pretrained(folder).components
    parts["tokenizer"].padding_side = "left"  # as Gemma's
    taken = inspect.signature(LTX2InContextPipeline.__init__).parameters
    pipeline = LTX2InContextPipeline(**{part: model for part, model in parts.items() if part in taken})
    pipeline.set_progress_bar_config(disable=True)
    request, (height, width) = request_of(name, folder), SIDES
    pairs = zip(images_of(name), CASES[name], strict=True)
    conditions = [LTX2VideoCondition(frames=image, index=PLACES[frame]) for image, frame in pairs]
    latents, _ = pipeline(
        reference_conditions=[LTX2ReferenceCondition(frames=list(frames(width, height, NUM_FRAMES)))],
        conditions=conditions or None,
        prompt=request.prompt,
        width=width,
        height=height,
        num_frames=request.num_frames,
        frame_rate=request.fps,
        num_inference_steps=request.num_inference_steps,
        **{f"{kind}{scale}": 1.0 for kind in ("", "audio_") for scale in ("guidance_scale", "modality_scale")},
        **{f"{kind}{scale}": 0.0 for kind in ("", "audio_") for scale in ("stg_scale", "guidance_rescale")},
        max_sequence_length=pipeline.tokenizer.model_max_length,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
        return_dict=False,
    )
    tokens: Tensor = latents.flatten(2).mT
    return tokens


def denoised(folder: Path, name: str, strategy: str) -> Tensor:
    """The clip's tokens, from a gang's rank."""
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    pipeline = load_pipeline(checkpoint, engine)
    sampler, ranks = pipeline.sampler, tuple(range(torch.distributed.get_world_size()))
    state = sampler.begin(request, pipeline.text_encoder.encode(request, along_with(name)))
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, engine.predict(sampler.branches(state), ranks))
    engine.close()
    values = sampler.latents(state)
    tokens: Tensor = values["latents"][:, : values["base_token_count"]]
    return tokens


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("a clip", 1),
        ("a picture begins", 1),
        ("pictures too", 2),
        pytest.param("pictures too", 4, marks=pytest.mark.slow),
        pytest.param("a clip", 2, marks=pytest.mark.slow),
        pytest.param("a clip", 4, marks=pytest.mark.slow),
    ],
)
def test_latents_equal_those_of_the_classic_pipeline(name: str, num_ranks: int, folder: Path) -> None:
    expected = own_latents(name, folder)
    assert expected.std() > 0.1
    for strategy in STRATEGIES[num_ranks]:
        for tokens in gang(num_ranks).run(denoised, folder, name, strategy):
            assert relative_difference(tokens, expected) <= TOLERANCE, strategy


def test_the_clip_matters_and_previews_have_the_results_size(folder: Path) -> None:
    request, pipeline = request_of("a clip", folder), load_pipeline(Checkpoint(folder))
    states = list(pipeline.states(request, along_with("a clip")))
    latents = pipeline.sampler.latents(states[-1])
    plain = pipeline.denoise(request_of("a clip", folder, num_video_frames=0))["latents"]
    assert relative_difference(latents["latents"][:, : latents["base_token_count"]], plain) > 10 * TOLERANCE
    made = pipeline.decoder.decode(latents, request)
    assert (made.shape, made.dtype) == ((NUM_FRAMES, *SIDES, 3), np.dtype(np.uint8))
    preview = pipeline.decoder.preview(pipeline.sampler.preview(states[1]), request)
    assert preview.shape == (1, *SIDES, 3)
