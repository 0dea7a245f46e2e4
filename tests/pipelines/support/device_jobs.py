"""Jobs on one device, with the steps of a gang of one rank: on a GPU they are captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.core.packing import joined, pack, unpack
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest
from pipelines.run import Pipeline, load_pipeline

Latents = Mapping[str, Tensor]
TOLERANCE = 2e-3
"""Relative, between a GPU and a CPU in float32 without TF32: sums are added in another order, and guidance scales the
difference up."""
HALF_TOLERANCE = 0.1
"""The same in bfloat16, which has 8 bits: some tens of roundings add up. Other noise differs by 1.4."""
OTHER: dict[str, Any] = {"prompt": "a low square", "seed": 6}
"""Another request of equal shapes: its prompt has as many letters as ``a red circle``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """``own`` returns diffusers' result for a request, by names of latents. ``read`` returns the same from our
    decoder's inputs, and ``like`` gives it their form: some pipelines return latents as tokens."""

    request: MediaRequest
    own: Callable[[MediaRequest], Latents]
    inputs: InputPictures = NO_PICTURES
    read: Callable[[Mapping[str, Any]], Latents] = lambda values: {"latents": values["latents"]}
    like: Callable[[Tensor, Tensor], Tensor] = lambda ours, expected: ours

    @property
    def other(self) -> Job:
        """Return the same job with another prompt and seed."""
        return replace(self, request=replace(self.request, **OTHER))

    def check(self, latents: Latents, tolerance: float) -> None:
        """Check ``latents`` against diffusers' own."""
        expected = {name: x for name, x in self.own(self.request).items() if name.endswith("latents")}
        assert latents.keys() >= expected.keys()
        for name, x in expected.items():
            assert x.float().std() > 0.1, name
            difference = relative_difference(self.like(latents[name].float(), x), x.float())
            assert difference <= tolerance, name


class DeviceRank:
    """A checkpoint and an engine on its device. ``sends``: values are packed as between processes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        num_offloaded: int = 0,
        precision: str = "native",
        sends: bool = True,
        **how: Any,
    ) -> None:
        self.checkpoint, self._sends = checkpoint, sends
        model = checkpoint.denoiser(num_offloaded=num_offloaded, quantised=precision != "native")
        options = TorchOptions(offloaded_blocks=num_offloaded)
        self.engine = TorchEngine(model, options=options, precision=precision, **how)
        self._pipeline: Pipeline = load_pipeline(checkpoint, self.engine)

    @property
    def num_captured(self) -> int:
        return self.engine.num_captured

    def denoise(self, job: Job) -> Mapping[str, Any]:
        """Return the decoder's inputs. Values are packed as on the way to a gang and between its ranks."""
        sampler = self._pipeline.sampler
        self.checkpoint.defaults.check(job.request)
        state = sampler.begin(job.request, self._sent(self._pipeline.text_encoder.encode(job.request, job.inputs)))
        for step in range(sampler.num_steps(state)):
            state = sampler.advance(state, self.engine.predict(sampler.branches(state), (0,)))
            if step == 0:  # the state moves to another rank
                state = self._sent(state)
                first = job.request.stages[0]
                self._check_size(self._pipeline.decoder.preview(sampler.preview(state), first), first)
        return sampler.latents(state)

    def decode(self, latents: Mapping[str, Any], request: MediaRequest) -> None:
        self._check_size(self._pipeline.decoder.decode(latents, request), request)

    def _check_size(self, frames_FHWC: NDArray[Any], request: MediaRequest) -> None:
        assert frames_FHWC.shape[1:3] == (request.height, request.width)
        assert frames_FHWC.std() > 0

    def _sent(self, value: Any) -> Any:
        if not self._sends:
            return value
        skeleton, tensors = pack(value, self.engine.device)
        return unpack(skeleton, joined(tensors, self.engine.device)) if tensors else value


def check_jobs(checkpoint: Checkpoint, job: Job, tolerance: float = TOLERANCE, **choices: Any) -> None:
    """Check two jobs of one shape against diffusers, and that the first one gives the same bytes again.

    With captured steps all but the first are replays, so the second job shows that they read its inputs.
    """
    rank = DeviceRank(checkpoint, **choices)
    with closing(rank.engine):
        made = [rank.denoise(one) for one in (job, job.other, job)]
        rank.decode(made[-1], job.request)
        assert bool(rank.num_captured) == rank.engine.config.capture, "steps are captured"
    first, second, again = map(job.read, made)
    job.check(first, tolerance)
    job.other.check(second, tolerance)
    for name, x in first.items():
        assert torch.equal(again[name], x), f"{name} of the first job differ when it comes again"
        assert relative_difference(second[name].float(), x.float()) > 10 * TOLERANCE, "the jobs are different ones"


def made_on_cpu(checkpoint: Checkpoint, job: Job, **choices: Any) -> Job:
    """Return ``job`` with the eager CPU result of the same checkpoint in place of diffusers' own."""
    on_cpu = DeviceRank(Checkpoint(checkpoint.path, "cpu", checkpoint.dtype, file=checkpoint.file), **choices)
    return replace(
        job, own=lambda request: job.read(on_cpu.denoise(replace(job, request=request))), like=lambda ours, _: ours
    )
