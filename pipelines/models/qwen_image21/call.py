"""The call of Qwen-Image 2.1's transformer as few inputs, of which steps change only two. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


LATENTS, TIMESTEP, TEXT = "hidden_states", "timestep", "encoder_hidden_states"
PLACES, CONDITION = "img_mask", "condition_latents"
"""Places of reference pictures in the prompt, ``is_place_BT``, and their latents, ``x_BNC``."""
GRIDS = "img_shapes"
"""A constant: latent (frames, rows, columns) of each picture, the painted one last, by entry of the batch."""
SLOT = 4
"""Latent tokens for each place of a picture in the prompt."""


def num_seen(arguments: Mapping[str, Any]) -> int:
    """Return the number of tokens of the prompt, with those of pictures in their places."""
    num_latents = arguments[CONDITION].shape[1] if CONDITION in arguments else 0
    return int(arguments[TEXT].shape[1] + num_latents - num_latents // SLOT)


def constant_inputs(call: Mapping[str, Any], num_painted: int) -> Mapping[str, Tensor]:
    """Return the constants of a job, cached by the prompt's tensor: the blocks make new ones at every step."""
    text, latents = call[TEXT], call[LATENTS]
    if text not in _constants():
        constants = {PLACES: call[PLACES][:, : text.shape[1]].clone()}
        if latents.shape[1] > num_painted:
            constants[CONDITION] = latents[:, :-num_painted].clone()
        _constants()[text] = constants
    return _constants()[text]


@cache
def _constants() -> MutableMapping[Tensor, Mapping[str, Tensor]]:
    """Return the cache, by prompt; an entry is freed with its prompt."""
    from torch.utils.weak import WeakTensorKeyDictionary

    constants: MutableMapping[Tensor, Mapping[str, Tensor]] = WeakTensorKeyDictionary()
    return constants
