"""A pipeline in one process (encode, denoise, decode): the slow reference of tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.core.engine import EagerEngine, Engine
from engines.core.model import Branch, DenoiserModel
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.blocks.encoder import BlocksEncoder
from pipelines.blocks.sampler import BlocksSampler
from pipelines.blocks.state import BlocksState
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest


@dataclass(frozen=True, kw_only=True)
class PlainEngine(EagerEngine):
    """Calls the unsplit module, one branch after the other."""

    model: DenoiserModel
    """The transformers, whole on one device."""

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
        assert len(ranks) == 1, "the plain engine runs on one rank"
        assert not any(branch.additions for branch in branches), "the plain engine runs the weights as they are"
        assert not any(branch.attention for branch in branches), "the plain engine computes attention in its own way"
        return tuple(self.model.forward(self.model.modules[branch.module], branch.arguments) for branch in branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """All parts of one model in one process."""

    text_encoder: BlocksEncoder
    """Prompt and pictures to conditioning."""
    engine: Engine
    """The transformers, on one rank."""
    sampler: BlocksSampler
    """Conditioning to latents, by steps of the engine."""
    decoder: BlocksDecoder
    """Latents to pixels and sound."""

    def run(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> NDArray[Any]:
        """Return frames as uint8, shape (frames, height, width, 3)."""
        return self.decoder.decode(self.denoise(request, pictures), request)

    def denoise(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Mapping[str, Any]:
        """Return the final latents on the CPU, with the decoder's other inputs."""
        *_, state = self.states(request, pictures)
        return self.sampler.latents(state)

    def states(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Iterator[BlocksState]:
        """Yield the sampler's states: the one before the first step, then one after each step."""
        state = self.sampler.begin(request, self.text_encoder.encode(request, pictures))
        yield state
        for _ in range(self.sampler.num_steps(state)):
            branches = self.sampler.branches(state)
            predictions = self.engine.predict(branches, (0,)) if branches else ()
            state = self.sampler.advance(state, predictions)
            yield state


def load_pipeline(checkpoint: Checkpoint, engine: Engine | None = None) -> Pipeline:
    """Return all parts of ``checkpoint``; without ``engine``, a ``PlainEngine`` runs its denoiser."""
    return Pipeline(
        text_encoder=checkpoint.text_encoder(),
        engine=engine or checkpoint.own_engine() or PlainEngine(model=checkpoint.denoiser()),
        sampler=checkpoint.sampler(),
        decoder=checkpoint.decoder(),
    )
