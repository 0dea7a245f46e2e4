"""MiniMax-H3 with references on gangs of Gloo ranks equals diffusers' modular pipeline as users call it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from PIL import Image
from safetensors.torch import load_file, save_file

from engines.core.packing import pack
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.request import InputPicture, InputPictures, InputSound, InputVideo, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.tiny_lora import loader, write_lora
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints.tiny_minimax import LOAD_PROCESSOR, MiniMaxProcessor, minimax_h3_references
from tests.pipelines.support.references.own_call import Change, as_it_is, own_state
from tests.pipelines.support.references.video import Latents, denoised_from, frames, picture

NAMES = ("latents", "audio_latents")
SIDES = (64, 96)
NUM_FRAMES = 120
CASES: dict[str, tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = {
    "a picture": (((80, 50),), ()),
    "pictures": (((80, 50), (64, 96), (33, 71)), ()),
    "a clip": ((), (30,)),
    "all": (((80, 50), (64, 96)), (30, 22, 40)),
}
"""Sizes of pictures, and frames of clips."""
SOUNDS: dict[str, tuple[tuple[int, int], ...]] = {"all": ((2, 397), (0, 0), (1, 250))}
"""Channels and samples of each clip's sound; 0: none. The rate is the model's."""
SOUND_RATE = 320
RATES = {"a clip": 12, "all": 30}
"""Frame rate of the results. An input clip has the model's own rate."""
ALL = "all"
QUICK = {(ALL, 1, "ulysses"), (ALL, 2, "ring"), (ALL, 4, "ulysses"), (ALL, 4, "tensor"), ("a picture", 1, "ulysses")}
QUICK |= {("a clip", 1, "ulysses"), ("pictures", 2, "allgather_kv")}
GANGS = [
    pytest.param(name, num_ranks, strategy, marks=() if (name, num_ranks, strategy) in QUICK else pytest.mark.slow)
    for name in CASES
    for num_ranks in (1, 2, 4)
    for strategy in ((*CONTEXT, "tensor", "pipeline", "hybrid", "guidance") if num_ranks > 1 else ("ulysses",))
    if (strategy, num_ranks) != ("pipeline", 4)
]


def world() -> Any:
    return patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor())


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(minimax_h3_references)


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    sizes, lengths = CASES[name]
    first, *further = lengths or (0,)
    along = {"num_pictures": len(sizes), "num_video_frames": first, "further_video_frames": tuple(further)}
    along |= {"fps": RATES.get(name, 24), "sound_samples": tuple(number for _, number in SOUNDS.get(name, ()))}
    more = {"prompt": "<Picture 1> turns red", "num_inference_steps": 2, "seed": 5, **along, **changes}
    height, width = SIDES
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=NUM_FRAMES), **more)


def images_of(name: str) -> list[Image.Image]:
    return [picture(width, height, seed) for seed, (width, height) in enumerate(CASES[name][0])]


def clips_of(name: str) -> list[list[Image.Image]]:
    """Return the clips, each from another part of one film."""
    height, width = SIDES
    return [
        list(frames(width, height, length + 3 * number))[3 * number :] for number, length in enumerate(CASES[name][1])
    ]


def sounds_of(name: str) -> list[torch.Tensor | None]:
    """Return the sound of each clip, (channels, samples)."""
    shapes = SOUNDS.get(name, ((0, 0),) * len(CASES[name][1]))
    generators = [torch.Generator().manual_seed(seed) for seed, _ in enumerate(shapes)]
    made = [torch.rand(shape, generator=each) * 2 - 1 for shape, each in zip(shapes, generators, strict=True)]
    return [sound if sound.numel() else None for sound in made]


def along_with(name: str) -> InputPictures:
    height, width = SIDES
    videos = []
    for shown, sound in zip(clips_of(name), sounds_of(name), strict=True):
        data = b"".join(frame.tobytes() for frame in shown)
        size = {"width": width, "height": height, "num_frames": len(shown), "fps": 24}
        kept = None if sound is None else input_sound(sound)
        videos.append(InputVideo(**size, data=data, sound=kept))
    images = tuple(map(InputPicture.of, images_of(name)))
    return InputPictures(pictures=images, video=next(iter(videos), None), further_videos=tuple(videos[1:]))


def input_sound(sound: torch.Tensor) -> InputSound:
    return InputSound(num_channels=len(sound), rate=SOUND_RATE, data=sound.numpy().tobytes())


def own_latents(name: str, folder: Path, request: MediaRequest, change: Change = as_it_is) -> Latents:
    """Return diffusers' latents; it counts the end of the last step as one more."""
    references: list[Any] = [MiniMaxH3ImageReference(image=one) for one in images_of(name)]
    for shown, sound in zip(clips_of(name), sounds_of(name), strict=True):
        rate = None if sound is None else SOUND_RATE
        references.append(MiniMaxH3VideoReference(frames=shown, fps=24.0, audio=sound, sample_rate=rate))
    steps = request.num_inference_steps + 1
    state = own_state(folder, request, change=change, references=references, num_inference_steps=steps)
    return {part: state.get(part) for part in NAMES}


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], Latents]:
    def of(name: str) -> Latents:
        with world():
            return own_latents(name, folder, request_of(name, folder))

    return cache(of)


@cache
def encoded(folder: Path, name: str) -> bytes:
    with world():
        conditioning = Checkpoint(folder).text_encoder().encode(request_of(name, folder), along_with(name))
    pack(conditioning, torch.device("cpu"))
    return pickle.dumps(conditioning)


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes) -> dict[str, Any]:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised_from(folder, request, conditioning, "ulysses")


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), GANGS)
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folder: Path, expected: Callable[[str], Latents]
) -> None:
    for latents in gang(num_ranks).run(
        denoised_from, folder, request_of(name, folder), encoded(folder, name), strategy
    ):
        for part, own in expected(name).items():
            assert own.std() > 0.1
            assert relative_difference(latents[part], own) <= TOLERANCE, part


def test_without_the_exchange_they_do_not(folder: Path, expected: Callable[[str], Latents]) -> None:
    for latents in gang(2).run(without_exchange, folder, request_of(ALL, folder), encoded(folder, ALL)):
        for part, own in expected(ALL).items():
            assert relative_difference(latents[part], own) > 10 * TOLERANCE


def test_each_reference_and_their_order_matter(folder: Path, expected: Callable[[str], Latents]) -> None:
    own = {name: expected(name)["latents"] for name in CASES}
    for name, latents in own.items():
        for other, others in own.items():
            assert name == other or relative_difference(latents, others) > 10 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_blank_references_have_the_shapes_of_real_ones(name: str, folder: Path) -> None:
    """The pictures have the shape of the result; a plan and an estimate count their rows."""
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    assert list(checkpoint.denoiser().modules) == ["transformer_ref"]
    assert checkpoint.num_steps(request) == request.num_inference_steps
    height, width = SIDES
    alike = InputPictures(
        pictures=tuple(InputPicture.of(picture(width, height, seed)) for seed, _ in enumerate(CASES[name][0])),
        video=along_with(name).video,
        further_videos=along_with(name).further_videos,
    )
    with world():
        conditioning = checkpoint.text_encoder().encode(request, alike)
    (blank,) = checkpoint.first_step(request)
    (real,) = checkpoint.sampler().branches(checkpoint.sampler().begin(request, conditioning))
    assert {key: x.dtype for key, x in blank.inputs.items()} == {key: x.dtype for key, x in real.inputs.items()}
    for value in ("hidden_states", "audio_hidden_states"):
        assert blank.inputs[value].shape == real.inputs[value].shape
    assert len(checkpoint.denoiser().probe()) == 2


@pytest.mark.parametrize("name", CASES)
def test_estimates_count_the_references_that_a_step_attends_to(name: str, folder: Path) -> None:
    """They are the other rows of its packed sequence, each of 2 x 2 places of the latents."""
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    opened = OpenedPipeline(folder, torch.device("cpu"), torch.float32)
    shapes, key = blank_conditioning(opened, request, 0).shapes, checkpoint.spec.reference_latents
    places = sum(math.prod(shape[2:]) for value, shape in shapes if value.startswith(f"{key}."))
    (branch,) = checkpoint.first_step(request)
    made = checkpoint.first_latents(request)["latents"].shape
    assert branch.inputs["hidden_states"].shape[1] == (places + math.prod(made[2:])) // 4


def test_pixels_of_references_stay_with_the_encoder(folder: Path) -> None:
    with world():
        conditioning = Checkpoint(folder).text_encoder().encode(request_of(ALL, folder), along_with(ALL))
    clips = ["video with sound", "video", "video with sound"]
    assert conditioning.values["normalized_references"] == ["image", "image", *clips]


def test_the_sound_of_clips_matters(folder: Path, expected: Callable[[str], Latents]) -> None:
    """Without it, the same clips make another result."""
    with patch.dict(SOUNDS, clear=True), world():
        silent = own_latents(ALL, folder, request_of(ALL, folder))
    for part, own in expected(ALL).items():
        assert relative_difference(silent[part], own) > 10 * TOLERANCE


def test_a_clip_of_frames_is_made(folder: Path) -> None:
    """Neither the result nor a preview holds the rows of references."""
    checkpoint, request = Checkpoint(folder), request_of(ALL, folder)
    with world():
        pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses"))
    *_, middle, last = pipeline.states(request, along_with(ALL))
    media = pipeline.decoder.decode_all(pipeline.sampler.latents(last), request)
    assert media.frames_FHWC.shape == (NUM_FRAMES, *SIDES, 3)
    assert media.frames_FHWC.dtype == np.uint8
    assert media.sound is not None
    assert pipeline.decoder.preview(pipeline.sampler.preview(middle), request).shape == (22, *SIDES, 3)


@pytest.mark.parametrize(("prefix", "part"), [("transformer", ""), ("transformer_ref", "transformer_ref")])
def test_an_adapter_is_added_to_its_transformer(
    prefix: str, part: str, folder: Path, tmp_path: Path, expected: Callable[[str], Latents]
) -> None:
    """Files are for the first transformer, unless their keys name the second; diffusers accepts both."""
    name, scale, path = "a picture", 0.8, write_lora(folder, tmp_path / "ink", seed=1, says_alpha=False)
    (file,) = path.glob("*.safetensors")
    save_file({key.replace("transformer.", f"{prefix}.", 1): x for key, x in load_file(file).items()}, file)
    checkpoint = Checkpoint(folder, loras=[LoraSource(path=str(path), scale=scale, part=part)])
    request = request_of(name, folder)
    with world():
        own = own_latents(name, folder, request, loader({path: scale}))["latents"]
        pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses"))
        *_, last = pipeline.states(request, along_with(name))
    assert relative_difference(pipeline.sampler.latents(last)["latents"], own) <= TOLERANCE
    assert relative_difference(expected(name)["latents"], own) > 10 * TOLERANCE
