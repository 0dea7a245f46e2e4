"""Steps without a request: for the warm-up of engines and the self-check of gangs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch
from pipelines.blocks.denoiser import GUIDERS
from pipelines.blocks.encoder import Conditioning
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.sampler import BlocksSampler
from pipelines.defaults import Defaults
from pipelines.request import MediaRequest

PROBE_SEED = 20240801
PROBE_TOKENS = 22
PROBE_SIZE = (6, 10)
"""Height and width of the probe's picture in the model's multiples; several ranks must pad its tokens."""
PROBE_FRAMES = 2
"""Frames of latents after the first, for clips."""


@dataclass(frozen=True, kw_only=True)
class BlocksProbe:
    """Return the branches of one small, seeded step of the pipeline's own blocks, equal on every rank.

    There are two branches, as with guidance, one for each transformer if there are two. Empty if the shapes of the
    conditioning are unknown.
    """

    opened: OpenedPipeline
    """The pipeline whose blocks run, on CPU or "meta" alike."""
    defaults: Defaults
    """Limits and defaults of requests, which set the step's size."""
    modules: tuple[str, ...]
    """Names of the transformers."""

    def __call__(self) -> tuple[Branch, ...]:
        if not self.opened.spec.has_known_conditioning:
            return ()
        multiple = self.defaults.size_multiple
        frames = 1 + PROBE_FRAMES * self.defaults.frame_multiple if self.defaults.kind == "video" else 1
        frames = max(frames, self.defaults.min_frames)
        request = MediaRequest(
            request_id="probe",
            model="probe",
            kind=self.defaults.kind,
            prompt="",
            height=PROBE_SIZE[0] * multiple,
            width=PROBE_SIZE[1] * multiple,
            num_frames=frames,
            fps=self.defaults.fps,
            num_inference_steps=max(2, self.defaults.min_steps),
            guidance_scale=self.defaults.guidance_scale,
            true_cfg_scale=2.0 if self._supports_guidance() else 1.0,
            seed=PROBE_SEED,
            num_pictures=self.defaults.usual_pictures,
            num_video_frames=frames if self.defaults.needs_video else 0,
            has_control=self.defaults.takes_control,
            num_layers=self.defaults.num_layers,
        )
        branches = first_step(self.opened, request, PROBE_TOKENS, torch.Generator().manual_seed(PROBE_SEED))
        both = branches if len(branches) > 1 else branches * 2
        return tuple(
            replace(branch, module=name, schedule=None)
            for branch, name in zip(both[:2], (self.modules[0], self.modules[-1]), strict=True)
        )

    def _supports_guidance(self) -> bool:
        """Return whether guidance may be used: distilled models with own guidance refuse it."""
        return self.defaults.true_cfg_scale > 1 or not self.opened.spec.has_own_guidance


def first_step(
    opened: OpenedPipeline, request: MediaRequest, num_tokens: int, generator: torch.Generator | None = None
) -> tuple[Branch, ...]:
    """Return the branches of the first step of ``request``, with blank prompts, or random ones from ``generator``."""
    sampler = BlocksSampler(opened)
    return sampler.branches(sampler.begin(request, blank_conditioning(opened, request, num_tokens, generator)))


def blank_conditioning(
    opened: OpenedPipeline, request: MediaRequest, num_tokens: int, generator: torch.Generator | None = None
) -> Conditioning:
    """Return conditioning as for a prompt of ``num_tokens``, from the configuration alone.

    ValueError if its shapes are unknown.
    """
    request, *others = request.stages

    def prompt() -> dict[str, Any]:
        blank = opened.spec.blank_conditioning(opened.part_config(opened.transformers[0]), num_tokens)
        return {name: x if "mask" in name else _fill(x, generator) for name, x in blank.items()}

    is_guided = request.true_cfg_scale > 1 or opened.spec.needs_negative
    is_guided = is_guided and not opened.spec.has_own_guidance
    values, negative = prompt(), prompt() if is_guided else None
    settings = {"batch_size": 1, "dtype": opened.dtype}
    names = opened.input_names((opened.sections.denoise,))
    values |= {name: value for name, value in settings.items() if name in names}
    if negative is not None and _has_guiders(opened):
        values |= {f"negative_{name}": x for name, x in negative.items()}
        negative = None
    values |= _blank_inputs(opened, request, generator)
    later = _blank_inputs(opened, others[0], generator) if others else None
    return Conditioning(values=values, kinds={}, dtype=torch.float32, negative=negative, later=later)


def _blank_inputs(
    opened: OpenedPipeline, request: MediaRequest, generator: torch.Generator | None
) -> Mapping[str, Any]:
    """Return the inputs of ``request`` in the shapes of encoded pictures and clips."""
    has_video = request.num_video_frames > 0 or opened.spec.has_video_values
    inputs = dict(opened.spec.blank_video(opened.path, request)) if has_video else {}
    if request.num_pictures or request.has_control:
        inputs |= opened.spec.blank_pictures(opened.path, request)
    return {name: _fill(x, generator) for name, x in inputs.items()}


def _has_guiders(opened: OpenedPipeline) -> bool:
    """Return whether the blocks have guiders; the folder's are not loaded yet."""
    parts = opened.blocks.sub_blocks[opened.sections.denoise].expected_components
    return any(part.name in GUIDERS for part in parts)


def _fill(value: Any, generator: torch.Generator | None) -> Any:
    return value if generator is None else _with_noise(value, generator)


def _with_noise(value: Any, generator: torch.Generator) -> Any:
    """Return random numbers in place of zeros."""
    if isinstance(value, list):
        return [_with_noise(x, generator) for x in value]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.any():
        return value
    return torch.randn(value.shape, generator=generator)
