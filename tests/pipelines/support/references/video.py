"""Clips from words and pictures on gangs of ranks, and diffusers' results for the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from engines.core.packing import pack
from engines.parallel.sharded import ShardedModel
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, InputVideo, MediaRequest
from pipelines.size import Size

Latents = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Clip:
    """``sides`` are height and width in the model's multiples: token counts that 4 ranks must pad.

    ``reference(folder, request, images)`` gives the finished latents by the names that the decoder reads.
    ``strategies`` are those of the plan besides dividing the tokens.
    """

    make: Callable[[Path], Path]
    reference: Callable[..., Latents]
    sides: tuple[int, int] = (3, 5)
    num_latent_frames: int = 2
    num_pictures: int = 0
    num_video_frames: int = 0
    strategies: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)

    def request(self, folder: Path) -> MediaRequest:
        defaults = Checkpoint(folder).defaults
        height, width = (side * defaults.size_multiple for side in self.sides)
        num_frames = 1 + (self.num_latent_frames - 1) * defaults.frame_multiple
        size = Size(width=width, height=height, num_frames=num_frames)
        words = {"prompt": "a red circle", "negative_prompt": "blue"}
        inputs = {"num_pictures": self.num_pictures, "num_video_frames": self.num_video_frames}
        more = {"num_inference_steps": 2, "seed": 5, **inputs, **self.changes}
        return defaults.request(size, **{**words, **more})

    def images(self, request: MediaRequest) -> tuple[Image.Image, ...]:
        """Return different pictures of the clip's size, or the ``Frames`` of an input clip."""
        if self.num_video_frames:
            return frames(request.width, request.height, self.num_video_frames)
        return tuple(picture(request.width, request.height, seed) for seed in range(self.num_pictures))

    def own(self, folder: Path) -> Latents:
        """Return diffusers' own result."""
        request = self.request(folder)
        return self.reference(folder, request, self.images(request))


class Frames(tuple[Image.Image, ...]):
    """Frames of an input clip, in place of pictures."""

    __slots__ = ()


def frames(width: int, height: int, number: int) -> Frames:
    """Return a picture that turns into another one."""
    first, last = picture(width, height, 1), picture(width, height, 2)
    return Frames(Image.blend(first, last, place / max(1, number - 1)) for place in range(number))


def named(images: tuple[Image.Image, ...]) -> dict[str, Any]:
    """Return them as inputs of a pipeline's own call."""
    if isinstance(images, Frames):
        return {"video": list(images)}
    return {"image": images[0]} if images else {}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth picture, so that scaling it is predictable."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def pictures_of(images: tuple[Image.Image, ...]) -> InputPictures:
    if isinstance(images, Frames):
        (width, height), data = images[0].size, b"".join(frame.tobytes() for frame in images)
        return InputPictures(
            video=InputVideo(width=width, height=height, num_frames=len(images), fps=1, data=data),
        )
    return InputPictures(pictures=tuple(map(InputPicture.of, images)))


@cache
def encoded(folder: Path, request: MediaRequest, inputs: InputPictures) -> bytes:
    """Return a pickled conditioning, made once a run in the tests' process, for all ranks, as in a job."""
    conditioning = Checkpoint(folder).text_encoder().encode(request, inputs)
    pack(conditioning, torch.device("cpu"))
    return pickle.dumps(conditioning)


def denoised_from(folder: Path, request: MediaRequest, conditioning: bytes, strategy: str) -> dict[str, Any]:
    """Return the decoder's inputs from a gang's rank. The state is sent before each step."""
    checkpoint, ranks = Checkpoint(folder), tuple(range(dist.get_world_size()))
    engine, sampler = TorchEngine(checkpoint.denoiser(), strategy=strategy), checkpoint.sampler()
    state = sampler.begin(request, pickle.loads(conditioning))
    for _ in range(sampler.num_steps(state)):
        pack(state, engine.device)
        state = pickle.loads(pickle.dumps(state))
        state = sampler.advance(state, engine.predict(sampler.branches(state), ranks))
    engine.close()
    return dict(sampler.latents(state))


def counted(folder: Path, request: MediaRequest, conditioning: bytes, strategy: str) -> tuple[dict[str, Any], int]:
    """Return the same, and the number of this rank's forwards."""
    with patch.object(ShardedModel, "forward", autospec=True, side_effect=ShardedModel.forward) as forward:
        return denoised_from(folder, request, conditioning, strategy), forward.call_count
