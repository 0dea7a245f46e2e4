"""Sizes before anybody asks for them: the branches that a step of that size will have, with a blank prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.defaults import check_request
from pipelines.family import Defaults, Family
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    import torch

    from engines.core.model import Branch

_WRITTEN = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


GUIDED = 2.0
"""Any true guidance scale: that it is above 1 is what gives a step its second branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Width and height in pixels; None frames are the model's default number."""

    width: int
    height: int
    num_frames: int | None = None

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read "1024x768" or, for clips, "832x480x81"."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"size {text!r}: write it as WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES")
        width, height, frames = match.groups()
        return cls(width=int(width), height=int(height), num_frames=int(frames) if frames else None)


def request_of(
    size: Size | None, defaults: Defaults, *, prompt: str = "", seed: int = 0, guided: bool = False
) -> MediaRequest:
    """The model's default request, in ``size`` if one is given. ValueError outside the model's limits.

    ``guided``: with true guidance, so that a step has two branches.
    """
    size = size or Size(width=defaults.width, height=defaults.height)
    request = MediaRequest(
        request_id="ahead",
        model="ahead",
        kind=defaults.kind,
        prompt=prompt,
        width=size.width,
        height=size.height,
        num_frames=size.num_frames or defaults.num_frames,
        fps=defaults.fps,
        num_inference_steps=defaults.num_inference_steps,
        guidance_scale=defaults.guidance_scale,
        true_cfg_scale=max(defaults.true_cfg_scale, GUIDED) if guided else 1.0,
        seed=seed,
    )
    check_request(request, defaults)
    return request


def branches_ahead(
    family: Family,
    path: Path,
    sizes: Sequence[str],
    modules: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Branch, ...]:
    """The first step's branch of each size for each of a model's ``modules``, in order; without sizes none."""
    branches = []
    for size in sizes:
        request = request_of(Size.parse(size), family.defaults(path))
        first = first_step(family, path, request, device, dtype)[0]
        branches += [replace(first, module=module) for module in modules]
    return tuple(branches)


def steps_ahead(
    family: Family,
    path: Path,
    sizes: Sequence[str],
    modules: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[tuple[Branch, ...], ...]:
    """A step of each size, with the model's usual number of branches, for each of its ``modules``."""
    defaults = family.defaults(path)
    steps = []
    for size in sizes:
        request = request_of(Size.parse(size), defaults, guided=defaults.true_cfg_scale > 1)
        branches = first_step(family, path, request, device, dtype)
        steps += [tuple(replace(branch, module=module) for branch in branches) for module in modules]
    return tuple(steps)


def first_step(
    family: Family, path: Path, request: MediaRequest, device: torch.device, dtype: torch.dtype
) -> tuple[Branch, ...]:
    """The branches of the first step of ``request``, with a blank prompt. On "meta" they have shapes alone."""
    sampler = family.load_sampler(path, device, dtype)
    return sampler.branches(sampler.begin(request, family.blank_conditioning(path, request)))
