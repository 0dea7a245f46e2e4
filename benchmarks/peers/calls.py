"""Types of the tables of peers' models, and the inputs of Cosmos 3 that peers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Call = Callable[[], Any]
Prepare = Callable[[Any, Mapping[str, Any]], Call]
"""Makes the forward of one branch from a peer's transformer and diffusers' arguments of that branch. It also makes what
a pipeline makes once a job."""


def known(table: Mapping[str, Any], name: str) -> Any:
    """Return the table's entry for a class of transformers. ValueError for other classes."""
    if name not in table:
        raise ValueError(f"peers are timed for {', '.join(table)}, not for {name}")
    return table[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipOfText:
    """One branch of Cosmos 3. diffusers gets it as one packed sequence: text, clip, and sound if it has one."""

    text_ids: Tensor
    """(1, text)."""
    text_positions: Tensor
    """(3, 1, text): frame, row and column."""
    latents: Tensor
    """(1, channels, frames, rows, columns)."""
    sound: Tensor | None
    """(1, channels, frames of sound)."""
    positions: Tensor
    """(3, 1, patches and frames of sound)."""
    timestep: Tensor
    """(1,)."""

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> ClipOfText:
        """Read diffusers' arguments. ValueError for pictures, given frames and actions, which peers take otherwise."""
        (latents,), (noisy,), length = own["vision_tokens"], own["vision_noisy_frame_indexes"], own["und_len"]
        if own.get("action_tokens") is not None or not 1 < latents.shape[2] == len(noisy):
            raise ValueError("peers are timed for clips that Cosmos 3 makes of text alone")
        positions = own["position_ids"].unsqueeze(1)
        return cls(
            text_ids=own["input_ids"].unsqueeze(0),
            text_positions=positions[..., :length],
            latents=latents,
            sound=own["sound_tokens"][0].unsqueeze(0) if own.get("sound_tokens") else None,
            positions=positions[..., length:],
            timestep=own["vision_timesteps"][:1],
        )
