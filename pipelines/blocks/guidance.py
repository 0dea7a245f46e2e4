"""Guidance by a second prompt (Ho & Salimans 2022, arXiv:2207.12598): by the pipeline's guiders, or by Troupe."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

SOUND_GUIDER = "audio_guider"
GUIDERS = ("guider", "guider_2", SOUND_GUIDER)


def guiders_of(pipeline: Any) -> tuple[str, ...]:
    """Return the parts of ``pipeline`` that mix predictions. Without any, it supports one prompt only."""
    return tuple(name for name in GUIDERS if getattr(pipeline, name, None) is not None)


def set_scale(pipeline: Any, scale: float) -> None:
    """Give ``pipeline`` its own guiders with this scale, one branch at 1. Sound keeps its own scale.

    A guider that counts from the prompt's own prediction needs one less for the same picture.
    """
    for name in guiders_of(pipeline):
        guider = copy.copy(getattr(pipeline, name))
        if name != SOUND_GUIDER:
            guider.guidance_scale = scale - counts_from_prompt(guider)
        guider.enable() if scale > 1 else guider.disable()
        setattr(pipeline, name, guider)


def counts_from_prompt(guider: Any) -> bool:
    """Return whether its scale is added to the prompt's own prediction, instead of the negative one."""
    return bool(getattr(guider, "use_original_formulation", False))


def guided(predictions: tuple[Tensor, ...], scale: float) -> Tensor:
    """Return one prediction from (prompt,) or (prompt, negative prompt)."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + scale * (positive - negative)
