"""A small step of a checkpoint, with drawn prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from engines.core.model import Branch
from pipelines.blocks import blank
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size

NUM_TEXT = 11


def first_step(folder: Path, num_pictures: int | None = None) -> tuple[Branch, ...]:
    """Return a step whose tokens ranks must pad; two branches with guidance. By default it has few pictures."""
    defaults, opened = Checkpoint(folder).defaults, OpenedPipeline(folder, torch.device("cpu"), torch.float32)
    size = Size(width=5 * defaults.size_multiple, height=3 * defaults.size_multiple, num_frames=defaults.num_frames)
    num_pictures = defaults.min_pictures if num_pictures is None else num_pictures
    request = defaults.request(size, num_inference_steps=3, num_pictures=num_pictures)
    return blank.first_step(opened, request, NUM_TEXT, torch.Generator().manual_seed(3))
