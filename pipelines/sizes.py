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

    from engines.model import Branch

_WRITTEN = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


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


def request_of(size: Size | None, defaults: Defaults, *, prompt: str = "", seed: int = 0) -> MediaRequest:
    """The model's default request, in ``size`` if one is given. ValueError outside the model's limits."""
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
        true_cfg_scale=1.0,
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
    defaults, sampler = family.defaults(path), family.load_sampler(path, device, dtype)
    branches = []
    for size in sizes:
        request = request_of(Size.parse(size), defaults)
        first = sampler.branches(sampler.begin(request, family.blank_conditioning(path, request)))[0]
        branches += [replace(first, module=module) for module in modules]
    return tuple(branches)
