"""A directory's own defaults: an optional ``troupe.json`` over what its family knows.

Its keys are those of ``Defaults`` (all but ``kind``): ``width``, ``height``, ``num_frames``, ``fps``,
``num_inference_steps``, ``guidance_scale``, ``true_cfg_scale``, ``size_multiple``, ``frame_multiple``, ``max_pixels``,
``max_frames`` and ``max_steps``. All are optional; an unknown key is an error.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipelines.family import Defaults
from pipelines.request import MediaRequest

FILE_NAME = "troupe.json"
KEYS = tuple(field.name for field in fields(Defaults) if field.name != "kind")


def with_own_defaults(path: Path, defaults: Defaults) -> Defaults:
    """``defaults`` with the values of ``path/troupe.json``, if there is one. ValueError for unknown keys."""
    file = path / FILE_NAME
    if not file.is_file():
        return defaults
    own: dict[str, Any] = json.loads(file.read_text())
    if unknown := sorted(own.keys() - set(KEYS)):
        raise ValueError(f"{file} has unknown keys {', '.join(unknown)}; known: {', '.join(KEYS)}")
    return replace(defaults, **own)


def check_request(request: MediaRequest, limits: Defaults) -> None:
    """ValueError if ``request`` is outside what the model can do; the message names the limit."""
    for problem in _problems(request, limits):
        raise ValueError(problem)


def _problems(request: MediaRequest, limits: Defaults) -> list[str]:
    size, pixels = f"{request.width}x{request.height}", request.width * request.height
    multiple, frames = limits.size_multiple, request.num_frames
    checks = {
        f"this model makes {limits.kind}s, not {request.kind}s": request.kind == limits.kind,
        f"size {size}: width and height must be positive multiples of {multiple}": _are_multiples(request, multiple),
        f"size {size}: at most {limits.max_pixels} pixels": pixels <= limits.max_pixels,
        f"{frames} frames: 1 plus a multiple of {limits.frame_multiple} is needed": frames >= 1
        and (frames - 1) % limits.frame_multiple == 0,
        f"{frames} frames: at most {limits.max_frames}": frames <= limits.max_frames,
        f"{request.num_inference_steps} steps: 1 to {limits.max_steps} are allowed": 1
        <= request.num_inference_steps
        <= limits.max_steps,
    }
    return [problem for problem, passed in checks.items() if not passed]


def _are_multiples(request: MediaRequest, multiple: int) -> bool:
    return all(size > 0 and size % multiple == 0 for size in (request.width, request.height))
