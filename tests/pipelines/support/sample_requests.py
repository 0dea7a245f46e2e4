"""Requests for tests."""

from __future__ import annotations

from typing import Any

from pipelines.request import MediaRequest

PICTURE: dict[str, Any] = {
    "request_id": "test",
    "model": "tiny",
    "kind": "image",
    "prompt": "a red circle above a blue star",
    "width": 48,
    "height": 32,
    "num_inference_steps": 3,
    "guidance_scale": 3.5,
    "true_cfg_scale": 1.0,
    "seed": 17,
}

CLIP: dict[str, Any] = {**PICTURE, "kind": "video", "num_frames": 5, "fps": 8}


def picture(**changes: Any) -> MediaRequest:
    return MediaRequest(**{**PICTURE, **changes})


def clip(**changes: Any) -> MediaRequest:
    return MediaRequest(**{**CLIP, **changes})
