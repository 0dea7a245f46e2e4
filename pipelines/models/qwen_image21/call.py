"""A call of Qwen-Image 2.1's transformer as few values, of which all but two are the same in every step of a job."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LATENTS, TIMESTEP, TEXT = "hidden_states", "timestep", "encoder_hidden_states"
PLACES, CONDITION = "img_mask", "condition_latents"
"""Where pictures to look at stand in the prompt, ``is_place_BT``, and their latents, ``x_BNC``."""
GRIDS = "img_shapes"
"""A constant: frames, rows and columns of latents of each picture, that which is painted last, for every entry."""
SLOT = 4
"""Latent tokens that a place for a picture in the prompt stands for."""


def num_seen(arguments: Mapping[str, Any]) -> int:
    """The tokens of the prompt, with those of pictures in their places."""
    num_latents = arguments[CONDITION].shape[1] if CONDITION in arguments else 0
    return int(arguments[TEXT].shape[1] + num_latents - num_latents // SLOT)


def constant_inputs(call: Mapping[str, Any], num_painted: int) -> Mapping[str, Tensor]:
    """The blocks make these anew at every step, of what comes with the prompt: its tensor tells whose they are."""
    text, latents = call[TEXT], call[LATENTS]
    if text not in _known():
        several = {PLACES: call[PLACES][:, : text.shape[1]].clone()}
        if latents.shape[1] > num_painted:
            several[CONDITION] = latents[:, :-num_painted].clone()
        _known()[text] = several
    return _known()[text]


@cache
def _known() -> MutableMapping[Tensor, Mapping[str, Tensor]]:
    """By the prompts that are there: with a prompt goes what is known by it."""
    from torch.utils.weak import WeakTensorKeyDictionary

    known: MutableMapping[Tensor, Mapping[str, Tensor]] = WeakTensorKeyDictionary()
    return known
