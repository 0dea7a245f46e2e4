"""Types of the tables of peers' models, and the inputs of Cosmos 3 and MiniMax-H3 that peers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS = 64
"""Peers fill up the packed sequence of MiniMax-H3 to a multiple of so many rows."""
PADDING = -1
"""Tag of a row that is none of video, text and audio."""
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


def packed_clip(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of both peers' ``MiniMaxH3DenoiseBranch``, but the device.

    diffusers' packed sequence has no rows to fill it up. ValueError for clips with conditions, which have timesteps of
    their own.
    """
    if own["timestep"].numel() != 1:
        raise ValueError("peers are timed for clips that MiniMax-H3 makes of text alone")
    tags, positions, video = own["token_tags"], own["position_ids"], own["video_indices"]
    rest = -len(tags) % ROWS
    packed = {
        "seq_len": len(tags) + rest,
        "img_pos": video,
        "audio_pos": own["audio_indices"],
        "text_pos": own["text_indices"],
        "update_mask": torch.ones_like(video, dtype=torch.bool),
        "img_position_ids": pad(positions, (0, 0, 0, rest)),
        "cu_seqlens": torch.tensor([0, len(tags), len(tags) + rest], dtype=torch.int32),
        "video_row_start": int(video[0]),
        "latent_grid": torch.tensor([axis.unique().numel() for axis in positions[video].unbind(1)]),
    }
    tags = pad(tags, (0, rest), value=PADDING)
    return {"packed": packed, "text_embeddings": own["encoder_hidden_states"][0], "token_tags": tags}


def modulation_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return widths of MiniMax-H3's modulations, which peers do not derive. Each of three kinds of rows has its own."""
    return {"adaln_out_features": 18 * config["hidden_size"], "final_adaln_out_features": 2 * config["hidden_size"]}


def packed_time(own: Mapping[str, Any]) -> float:
    """Return the timestep of all rows of MiniMax-H3's packed sequence."""
    time: float = own["timestep"].item()
    return time
